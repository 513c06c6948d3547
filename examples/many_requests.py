"""Many requests at once in asyncio; each stream ends by itself or when it is closed. Run: python examples/many_requests.py [MODEL]"""

import asyncio
import sys

from mlxinfer import AsyncLLM, SamplingParams

PROMPTS = ["The sky is", "One, two, three,", "The capital of France is", "To be or not to be,"]


async def write(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=16), timeout_s=60):
        text += chunk.text
    return text


async def main(model: str) -> None:
    async with AsyncLLM(model) as llm:
        texts = await asyncio.gather(*(write(llm, prompt) for prompt in PROMPTS))
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(prompt + text)
        print(llm.stats().steps, "steps")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
