"""A conversation that goes on in a new process: the first token of its next turn with its cache on disk, and with all of it read anew.

A process says the conversation and ends. Then pairs of new processes go on with it, one with the folder of its cache and one without,
each time in another order. Every process with a cache gets a copy of that folder, so that none finds what another one has added.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time, time

from .prose import TEXT

KINDS = ("resumed", "anew")
_ANSWER = 32
"""Tokens of the answer in the conversation that is gone on with."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn of a conversation in a new process."""

    tokens: int
    """Tokens of the prompt."""
    cached: int
    """Those of them that were not computed again."""
    first_s: float
    """Seconds from the message to the first token of its answer."""
    first_cpu_s: float
    """Seconds of processor time of all threads in it."""
    whole_s: float
    """Seconds from the start of the process to that token."""
    whole_cpu_s: float
    """Seconds of processor time of the process until then."""


def measure(model: Path | str, tokens: int, pairs: int) -> dict[str, list[Turn]]:
    """Turns by kind, as many as pairs; `tokens` is about how long the conversation is. Raises `RuntimeError` with what a process said."""
    with TemporaryDirectory() as temporary:
        folder, said = Path(temporary) / "prefix", Path(temporary) / "said.json"
        _run("say", model, said, folder, str(tokens))
        found: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
        for pair in range(pairs):
            for kind in KINDS if pair % 2 else KINDS[::-1]:
                copy = Path(temporary) / f"{kind}-{pair}"
                if kind == "resumed":
                    shutil.copytree(folder, copy)
                found[kind].append(Turn(**json.loads(_run("go on", model, said, copy if kind == "resumed" else ""))))
                shutil.rmtree(copy, ignore_errors=True)
    return found


def _run(*words: object) -> str:
    command = [sys.executable, "-m", __spec__.name, *map(str, words)]
    done = subprocess.run(command, env=os.environ | {"BENCHMARK_START": repr(time())}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout


def table(found: dict[str, list[Turn]]) -> str:
    """Markdown: medians, and the median of the pairs' ratios with the lowest and the highest."""
    last = found["resumed"][-1]
    lines = [
        f"{last.tokens} tokens of prompt, {last.cached} of them from disk; {len(found['anew'])} pairs",
        "",
        "| until the first token, s | resumed | read anew | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    names = {
        "first_s": "of the turn",
        "first_cpu_s": "processor time of it",
        "whole_s": "of the process",
        "whole_cpu_s": "its processor time",
    }
    for field, name in names.items():
        resumed, anew = ([getattr(turn, field) for turn in found[kind]] for kind in KINDS)
        shares = [a / b for a, b in zip(resumed, anew)]
        spread = f"{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
        lines.append(f"| {name} | {median(resumed):.3f} | {median(anew):.3f} | {spread} |")
    return "\n".join(lines) + "\n"


def _text(count: int) -> str:
    """Text of many paragraphs that are not alike."""
    return "\n".join(f"Note {number}. {TEXT}" for number in range(count))


def _say(model: str, said: Path, folder: str, tokens: int) -> None:
    from mlxinfer import LLM, SamplingParams

    with LLM(model, max_num_seqs=1, prefix_disk_gb=4, prefix_dir=folder) as llm:
        count = max(1, tokens // len(llm.tokenizer.encode(_text(1))))
        turns = [{"role": "user", "content": f"Summarize.\n{_text(count)}"}]
        answer = llm.chat(turns, SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True))
        said.write_text(json.dumps([*turns, {"role": "assistant", "content": answer.text}]), encoding="utf-8")


def _go_on(model: str, said: Path, folder: str) -> Turn:
    began, own = float(os.environ["BENCHMARK_START"]), process_time
    from mlxinfer import LLM, SamplingParams
    from mlxinfer.cli.repl.conversation import Conversation

    with LLM(model, max_num_seqs=1, prefix_disk_gb=4 if folder else 0, prefix_dir=folder or None) as llm:
        conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=1))
        conversation.turns = json.loads(said.read_text(encoding="utf-8"))
        asked, asked_cpu = time(), own()
        chunk = next(iter(conversation.ask("And in one sentence?")))
        now, cpu = time(), own()
        usage = chunk.usage
        assert usage is not None  # the first chunk is the last, of one token
        return Turn(usage.prompt_tokens, usage.stats.reused_tokens, now - asked, cpu - asked_cpu, now - began, cpu)


if __name__ == "__main__":
    what, model_path, file, prefix, *more = sys.argv[1:]
    if what == "say":
        _say(model_path, Path(file), prefix, int(*more))
    else:
        print(json.dumps(asdict(_go_on(model_path, Path(file), prefix))))
