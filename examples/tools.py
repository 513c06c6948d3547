"""A model that calls Python functions. Run: python examples/tools.py [MODEL]"""

import sys
from typing import Literal

from mlxinfer import LLM, SamplingParams, Tool


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Tell the weather of a city.

    Args:
        city: The city's name.
        unit: The unit of the temperature.
    """
    return f"It is sunny in {city}, 21 degrees {unit}."


tools = {"get_weather": Tool.from_function(get_weather)}
llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
messages: list[dict] = [{"role": "user", "content": "What is the weather in Paris?"}]
params = SamplingParams(temperature=0, max_tokens=100)
# "auto" leaves it to the model; a small one needs to be told.
answer = llm.chat(messages, params, tools=list(tools.values()), tool_choice="required", parallel_tool_calls=False)
calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in answer.tool_calls]
messages.append({"role": "assistant", "content": answer.text, "tool_calls": calls})
for call in answer.tool_calls:
    result = tools[call.name].run(call.arguments)
    print(f"{call.name}({call.arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(llm.chat(messages, params).text)
