"""A program: loads the model directory of its argument as on a Mac's GPU, with the kernels in the emulator, and answers a prompt. Prints
JSON with the kernels launched until the model was loaded, those of the answer, and the answer's tokens."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import mlx.core as mx


def main(model: str) -> None:
    os.environ |= {"MLXINFER_KERNELS": "emulator", "MLXINFER_CPU_KERNELS": "0"}
    mx.disable_compile()
    from mlxinfer.util import device

    device.is_gpu = lambda: True  # before other modules import it
    device.default_dtype = lambda: mx.bfloat16
    from mlxinfer import LLM, SamplingParams
    from mlxinfer.kernels_metal.emulator.kernel import Kernel
    from mlxinfer.kernels_metal.experts import trial as experts_trial
    from mlxinfer.kernels_metal.quantized_matmul import trial

    launches: Counter[str] = Counter()
    call = Kernel.__call__

    def counted(kernel: Kernel, **arguments: Any) -> list[mx.array]:
        launches[kernel.body.name] += 1
        return call(kernel, **arguments)

    Kernel.__call__ = counted  # type: ignore[method-assign]
    trial.speeds.__kwdefaults__.update(width=256, most_bytes=1 << 15)
    experts_trial.speeds.__kwdefaults__.update(most_bytes=1 << 15)
    llm = LLM(model, kv="4", bits=4, memory_gb=1.0)
    loaded = dict(launches)
    launches.clear()
    (answer,) = llm.generate([list(range(3, 80))], SamplingParams(max_tokens=4, temperature=0))
    sys.stdout.write(json.dumps({"loaded": loaded, "answered": launches, "tokens": answer.token_ids}))


if __name__ == "__main__":
    main(sys.argv[1])
