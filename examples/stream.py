"""Text as it is written, and the tokens' probabilities. Closing the stream stops the generation. Run: python examples/stream.py [MODEL]"""

import math
import sys

from mlxinfer import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24, logprobs=3)

surprising = []
for chunk in llm.stream("Once upon a time", params):
    print(chunk.text, end="", flush=True)
    surprising += [token for token in chunk.logprobs or [] if math.exp(token.logprob) < 0.1]
print("\n\nless likely than 10 %:", [token.text for token in surprising])
