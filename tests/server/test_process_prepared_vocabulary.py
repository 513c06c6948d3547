"""A server prepares the vocabulary once it is ready, so that the first request with a schema or tools does not wait."""

import asyncio
import signal
import threading

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import AsyncLLM
from mlxinfer.config import EngineArgs
from mlxinfer.server import process as serve
from mlxinfer.server.model_manager.model_slot import ModelSlot
from mlxinfer.server.model_manager.registry import Registry
from mlxinfer.server.settings import ServerSettings


@pytest.mark.long
def test_it_is_prepared_after_the_server_is_ready(tmp_path, short_path, monkeypatch):
    path = tiny_directory(tmp_path / "tiny", characters=JSON_CHARACTERS)
    told, prepared = [], []

    async def served(self, sockets):
        grammars = next(iter(models)).inputs.grammars
        prepared.append(grammars._table is None)
        self._ready()
        for thread in threading.enumerate():
            if thread.name == "mlxinfer vocabulary":
                await asyncio.to_thread(thread.join)
        prepared.append(grammars._table is not None)

    models = []
    ready = AsyncLLM.ready

    async def remembered(self):
        await ready(self)
        models.append(self._opened_now)

    monkeypatch.setattr(AsyncLLM, "ready", remembered)
    monkeypatch.setattr(serve.HTTPServer, "serve", served)
    handlers = {number: signal.getsignal(number) for number in serve._SIGNALS}
    try:
        slot = ModelSlot(EngineArgs(path), AsyncLLM.of)
        tiny = serve.ServerModels(registry=Registry({"tiny": slot}), at_start=[slot])
        serve.run(tiny, ServerSettings(socket=short_path / "api.sock"), tell=told.append)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert prepared == [True, True]
    assert told[0].startswith("ready on")


def test_a_model_without_an_end_token_is_no_trouble(tmp_path):
    async def prepare():
        async with AsyncLLM(tiny_directory(tmp_path / "endless", eos=False)) as llm:
            await llm.ready()
            llm._opened_now.inputs.grammars.prepare()

    asyncio.run(prepare())
