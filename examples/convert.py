"""Quantize a checkpoint to an MLX directory, and load it. Run: python examples/convert.py [MODEL] [OUT]"""

import sys
import tempfile
from pathlib import Path

from mlxinfer import LLM
from mlxinfer.convert import convert

source = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()) / "converted"

report = convert(source, target, bits=4)
print(f"{report.source_nbytes / 1e6:.0f} MB became {report.nbytes / 1e6:.0f} MB. {report.quality.verdict if report.quality else ''}")
llm = LLM(target)
print(llm.generate("The capital of France is", temperature=0, max_tokens=8)[0])
