"""A cache in 4 bits: what it costs, and a long prompt that is read once for two questions. Run: python examples/long_context.py [MODEL]"""

import sys

from mlxinfer import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", kv="4")
print(*llm.notes, sep="\n")  # a setting that loses quality says how much

story = "The red fox crossed the river and met a grey owl. " * 40
for question in ("Whom did the fox meet?", "What did the fox cross?"):
    answer = llm.chat([{"role": "user", "content": f"{story}\n\n{question}"}], SamplingParams(temperature=0, max_tokens=12))
    usage = answer.usage
    print(f"{usage.stats.reused_tokens} of {usage.prompt_tokens} prompt tokens were cached: {answer.text!r}")
