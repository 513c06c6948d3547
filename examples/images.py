"""Questions about a picture. Run: python examples/images.py MODEL PICTURE [QUESTION]"""

import sys

from mlxinfer import LLM, SamplingParams

model, picture = sys.argv[1:3]
question = sys.argv[3] if len(sys.argv) > 3 else "Describe this picture in one sentence."
llm = LLM(model)
layout = llm.image_layout(picture)  # from the file's header
print(f"{layout.size[1]} x {layout.size[0]} pixels, {layout.tokens} of {llm.count_tokens(question, images=[picture])} tokens of the prompt")

params = SamplingParams(temperature=0, max_tokens=100)
messages: list[dict] = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]
answer = llm.chat(messages, params)
print(answer.text)

messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Name one detail."}]
later = llm.chat(messages, params)
print(later.text)
stats = later.usage.stats
print(
    f"encoded in {answer.usage.stats.image_encode_s:.2f} s; {stats.reused_tokens} tokens of the next prompt, the picture's too, were cached"
)
