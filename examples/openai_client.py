"""The server through OpenAI's client: `mlxinfer serve smollm2 --port 8080`, then python examples/openai_client.py [URL]"""

import sys

from openai import APIConnectionError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
client = OpenAI(base_url=url, api_key="unused", max_retries=0)
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    sys.exit(f"Nothing answers at {url}: start mlxinfer serve first, as in mlxinfer serve smollm2 --port 8080")
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=16, stream=True
)
for event in stream:
    print(event.choices[0].delta.content or "" if event.choices else "", end="", flush=True)
print()
