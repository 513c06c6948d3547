"""A prompt, a batch of prompts, and a chat message. Run: python examples/generate.py [MODEL]"""

import sys

from mlxinfer import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
greedy = SamplingParams(temperature=0, max_tokens=16)

print(llm.chat("What is the capital of France?", greedy))  # or a list of messages

for completion in llm.generate(["The sky is", "One, two, three,"], greedy):  # one batch
    print(repr(completion.text), completion.finish_reason, completion.usage.completion_tokens, "tokens")
