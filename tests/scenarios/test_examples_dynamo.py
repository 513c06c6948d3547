"""The Dynamo worker of the examples against a stand-in for Dynamo's Python package: requests and pieces in its form, cancels, errors."""

from __future__ import annotations

import asyncio
import runpy
import sys
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams

PROMPT = list(range(3, 90))


@dataclass
class Values:
    """Keeps whatever it is made of."""

    def __init__(self, *args: Any, **values: Any) -> None:
        self.args = args
        vars(self).update(values)


class Refused(Exception):
    pass


class Down(Exception):
    pass


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    contents: dict[str, dict[str, Any]] = {
        "dynamo": {}, "dynamo.common": {}, "dynamo.llm": {},
        "dynamo.common.backend": {"LLMEngine": object, "EngineConfig": Values, "LlmRegistration": Values, "WorkerConfig": Values},
        "dynamo.common.backend.publisher": {"ComponentSnapshot": Values, "ZmqSource": Values},
        "dynamo.common.backend.run": {"run": None},
        "dynamo.llm.exceptions": {"EngineShutdown": Down, "InvalidArgument": Refused},
    }  # fmt: skip
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(Path(__file__).parents[2] / "examples/dynamo/worker.py"))


class Snapshots(list[Any]):
    def publish(self, rank: int, snapshot: Any) -> None:
        self.append(snapshot)


def request(**more: Any) -> dict[str, Any]:
    """As Dynamo's preprocessor makes it, nulls included."""
    sampling = {"temperature": 0.0, "top_p": None, "top_k": None, "seed": None, "n": None} | more.pop("sampling_options", {})
    return {"token_ids": PROMPT, "model": "tiny", "sampling_options": sampling, "output_options": {}, **more}


def test_a_worker(example: dict[str, Any], tmp_path: Path, short_path: Path) -> None:
    path = tiny_directory(tmp_path / "tiny", eos=False, context=256)
    with LLM(path, memory_gb=1) as llm:
        greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].token_ids
        stopped = greedy.index(greedy[3]) + 1
        seeded = [c.token_ids for c in llm.generate(PROMPT, SamplingParams(temperature=1, seed=5, n=2, max_tokens=8))]

    async def go() -> None:
        engine, config = await example["MLXInferEngine"].from_args(
            [str(path), "--memory", "1", "--kv-events", "ipc:///" + str(short_path / "kv")]
        )
        assert (config.discovery_backend, config.event_plane, config.served_model_name) == ("file", "zmq", "tiny")
        engine.attach_snapshot_publisher(snapshots := Snapshots())
        described = await engine.start(1)
        assert (described.llm.context_length, described.llm.kv_cache_block_size) == (256, 64)
        assert [source.endpoint for source in await engine.kv_event_sources()] == [engine._given.kv_events]

        async def asked(**more: Any) -> list[dict[str, Any]]:
            return [piece async for piece in engine.generate(request(**more), None)]

        def tokens(pieces: list[dict[str, Any]], index: int = 0) -> list[int]:
            return [token for piece in pieces if piece["index"] == index for token in piece["token_ids"]]

        plain = await asked(stop_conditions={"max_tokens": 12, "stop": None})
        assert tokens(plain) == greedy
        assert plain[-1]["finish_reason"] == "length"
        assert plain[-1]["completion_usage"] == {"prompt_tokens": 87, "completion_tokens": 12, "total_tokens": 99}
        ended = await asked(stop_conditions={"max_tokens": 12, "stop_token_ids_hidden": [greedy[3]]})
        assert (tokens(ended), ended[-1]["finish_reason"]) == (greedy[:stopped], "stop")
        ignored = await asked(stop_conditions={"max_tokens": 12, "stop_token_ids_hidden": [greedy[3]], "ignore_eos": True})
        assert tokens(ignored) == greedy
        several = await asked(sampling_options={"temperature": 1.0, "seed": 5, "n": 2}, stop_conditions={"max_tokens": 8})
        assert [tokens(several, index) for index in (0, 1)] == seeded
        async with aclosing(engine.generate(request(stop_conditions={"max_tokens": 150}), None)) as pieces:
            await anext(pieces)  # the client leaves
        while engine._llm.stats().running:
            await asyncio.sleep(0.001)
        with pytest.raises(Refused, match="temperature"):
            await asked(sampling_options={"temperature": -1.0})
        with pytest.raises(Refused, match="256"):
            await asked(token_ids=[5] * 300)
        assert snapshots[-1].args[1] > 0  # pages there are
        await engine.cleanup()
        await engine.cleanup()

    pytest.importorskip("zmq")
    asyncio.run(go())
