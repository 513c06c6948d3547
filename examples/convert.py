"""Quantize a checkpoint to an MLX directory, and load it. Run: python examples/convert.py [MODEL] [OUT]"""

import sys
import tempfile
from pathlib import Path

from mlxinfer import LLM, SamplingParams
from mlxinfer.convert import convert

source = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()) / "converted"

convert(source, target, bits=8)
llm = LLM(target)
print(f"{target.name}: {llm.weight_bytes / 1e6:.0f} MB")
print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].text)
