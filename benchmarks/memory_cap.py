"""Work that needs twice the available memory: `python -m benchmarks memory-cap`.

A separate process gets a hard limit, loads a model, and is given requests whose keys and values alone take twice as much, all at once, and
one that can never fit. It must finish with every request answered or refused; exceeding the limit would kill it or raise `MemoryError`.
To have a control group set the limit instead:

    systemd-run --user --scope -p MemoryMax=600M -p MemorySwapMax=0 python -m benchmarks memory-cap --limit outside
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from .system import ROOT

KINDS = {"data": (resource.RLIMIT_DATA, "VmData"), "address space": (resource.RLIMIT_AS, "VmSize")}
OUTSIDE = "outside"
_PROMPT, _ANSWER = 256, 512
_TOKENS = range(32, 96)


def run(path: Path, kind: str, megabytes: int) -> dict[str, Any]:
    """The report of the process, with `code`: its exit status, negative for a signal."""
    job = json.dumps({"path": str(path), "kind": kind, "cap": megabytes * 10**6})
    done = subprocess.run([sys.executable, "-m", "benchmarks.memory_cap", job], cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"words": done.stderr.strip()[-500:]}
    return found | {"code": done.returncode, "limit": kind, "cap": megabytes * 10**6}


def passed(found: Mapping[str, Any]) -> bool:
    """Whether there was more work than memory, and nothing went wrong."""
    ended = found["code"] == 0 and found["answered"] == found["asked"]
    return ended and found["wanted"] >= 2 * found["cap"] and found["preemptions"] > 0 and bool(found["refused"])


def lines(found: Mapping[str, Any]) -> str:
    """Markdown."""
    head = f"{found['cap'] / 1e6:.0f} MB beyond what the process has before it loads the model (limit: {found['limit']}). "
    if found["code"]:
        return f"- {head}The process ended with {found['code']}: {found['words']}\n"
    return (
        f"- {head}{found['asked']} requests, whose keys and values are {found['wanted'] / 1e6:.0f} MB: {found['answered']} answered with "
        f"{found['tokens']} tokens in {found['seconds']:.0f} s, {found['preemptions']} preemptions. "
        f"Weights {found['weights'] / 1e6:.0f} MB; the process held {found['peak'] / 1e6:.0f} MB at most, {found['before'] / 1e6:.0f} MB "
        f"of them before. Refused at once: “{found['refused']}”\n"
    )


def measure(path: str, kind: str, cap: int) -> dict[str, Any]:
    """Runs in the limited process."""
    from mlxinfer import LLM, MLXInferError, SamplingParams

    before = status("VmRSS")
    if kind != OUTSIDE:
        limit, field = KINDS[kind]
        most = status(field) + cap
        resource.setrlimit(limit, (most, most))
    with LLM(path) as llm:
        size = _token_bytes(llm.config, llm.dtype.size)
        count = -(-2 * cap // (size * (_PROMPT + _ANSWER)))
        prompts = [random.Random(number).choices(_TOKENS, k=_PROMPT) for number in range(count)]
        try:
            llm.generate([[_TOKENS[0]] * (2 * cap // size)], SamplingParams(max_tokens=1))
            refused = ""
        except MLXInferError as error:
            refused = str(error)
        begun = perf_counter()
        answers = llm.generate(prompts, SamplingParams(max_tokens=_ANSWER, ignore_eos=True, seed=1))
        seconds, stats = perf_counter() - begun, llm.stats()
        return {
            "asked": count,
            "answered": sum(len(answer.token_ids) == _ANSWER for answer in answers),
            "tokens": sum(len(answer.token_ids) for answer in answers),
            "wanted": count * (_PROMPT + _ANSWER) * size,
            "refused": refused,
            "preemptions": stats.preemptions,
            "seconds": seconds,
            "weights": llm.weight_bytes,
            "before": before,
            "peak": status("VmHWM"),
        }


def _token_bytes(config: Mapping[str, Any], item: int) -> int:
    """Keys and values of one token, in a model whose layers are all alike."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * int(head) * item


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes. Linux only."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(**json.loads(sys.argv[1]))) + "\n")
