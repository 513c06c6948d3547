"""Adapters that are loaded and unloaded while a model runs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.models.adapters import random_changes, shapes_of, write_mlx_lm, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, SamplingParams
from mlxinfer.errors import AdapterError, MemoryPlanError, SamplingError, SettingError

PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 96, 150)]
SETTINGS = {"dtype": "float32", "memory_gb": 2, "adapter_memory_gb": 0.05}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("base") / "llama", eos=False, context=1024)


@pytest.fixture(scope="module")
def paths(base, tmp_path_factory) -> dict[str, Path]:
    """Different ranks, projections and formats."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), shapes_of(base)
    return {
        "small": write_peft(folder / "small", random_changes(shapes, 1, rank=2), rank=2),
        "large": write_peft(folder / "large", random_changes(shapes, 2, rank=20, size=0.03), rank=20),
        "few": write_mlx_lm(folder / "few", random_changes(shapes, 3, projections=["q_proj", "down_proj"], size=0.4)),
        "dora": write_peft(folder / "dora", random_changes(shapes, 4, dora=True, layers=[0])),
    }


def params(adapter: str | None, count: int = 16) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, adapter=adapter)


def answer(llm: LLM, adapter: str | None, count: int = 16) -> list[int]:
    return llm.generate(PROMPT, params(adapter, count))[0].token_ids


@pytest.fixture(scope="module")
def expected(base, paths) -> dict[str | None, list[int]]:
    with LLM(base, adapters=paths, prefix_cache=False, **SETTINGS) as llm:
        found = {name: answer(llm, name) for name in (None, *paths)}
    assert len({tuple(tokens) for tokens in found.values()}) == 5
    return found


def test_in_any_order_each_answers_as_if_it_had_been_there_from_the_start(base, paths, expected):
    """Ranks that grow and shrink, projections that come and go, with a magnitude and without; files may be gone by then."""
    with LLM(base, **SETTINGS) as llm:
        there: list[str] = []
        for name in ("few", "small", "large", "-small", "dora", "-large", "-few", "small", "-dora", "-small", "large"):
            if name.startswith("-"):
                llm.unload_adapter(name[1:])
                there.remove(name[1:])
            else:
                llm.load_adapter(name, paths[name])
                there.append(name)
            assert llm.adapters == tuple(there)
            names = [None, *there]
            together = llm.generate([PROMPT] * len(names), [params(each) for each in names])
            assert [each.token_ids for each in together] == [expected[each] for each in names]


def test_memory_is_given_back_and_taken_from_what_was_planned(base, paths):
    with LLM(base, **SETTINGS) as llm:
        used = llm.plan.used
        llm.load_adapter("large", paths["large"])
        adapted = llm._client.opened.adapters.adapted
        alone = adapted.nbytes
        assert 0 < alone <= 0.05e9
        llm.load_adapter("small", paths["small"])
        assert adapted.nbytes > alone
        llm.unload_adapter("small")
        assert adapted.nbytes == alone
        llm.unload_adapter("large")
        assert (adapted.nbytes, adapted.adapted) == (0, llm.loaded.model)
        assert llm.plan.used == used
    with LLM(base, **SETTINGS | {"adapter_memory_gb": 0.0}) as llm:
        left = llm.plan.left
        llm._client.opened.adapters._take_memory = lambda wanted: 1000
        with pytest.raises(MemoryPlanError, match=r"would take .* MB, and 0.001 MB are planned for them: .*adapter_memory_gb"):
            llm.load_adapter("large", paths["large"])
        assert (llm.adapters, llm.plan.left) == ((), left)


def test_one_in_use_goes_when_its_requests_have_ended(base, paths, expected):
    with LLM(base, **SETTINGS) as llm:
        llm.load_adapter("small", paths["small"])
        llm.load_adapter("few", paths["few"])
        adapted = llm._client.opened.adapters.adapted
        stream = llm.stream(PROMPT, params("small"))
        tokens = list(next(stream).token_ids)
        both = adapted.nbytes
        llm.unload_adapter("small")
        assert llm.adapters == ("few",)
        assert adapted.leaving
        assert adapted.nbytes == both
        with pytest.raises(SamplingError, match="none called 'small'; there are few"):
            answer(llm, "small")
        llm.load_adapter("small", paths["large"])  # its name is free at once
        assert answer(llm, "small") == expected["large"]
        assert answer(llm, "few") == expected["few"]
        assert tokens + [token for chunk in stream for token in chunk.token_ids] == expected["small"]
        assert not adapted.leaving
        stream = llm.stream(PROMPT, params("few"))
        next(stream)
        llm.unload_adapter("few")
        stream.close()  # a request that is given up lets it go as well
        assert answer(llm, None) == expected[None]
        assert not adapted.leaving


def test_the_same_name_with_other_bytes_does_not_find_the_old_prefix(base, paths, expected, tmp_path):
    place = shutil.copytree(paths["small"], tmp_path / "it")
    with LLM(base, prefix_disk_gb=0.1, prefix_dir=tmp_path / "prefix", **SETTINGS) as llm:
        llm.load_adapter("it", place)
        assert answer(llm, "it") == expected["small"]
        shutil.rmtree(place)  # nothing is read again
        llm.load_adapter("few", paths["few"])
        llm.unload_adapter("it")
        shutil.copytree(paths["large"], place)
        llm.load_adapter("it", place)
        again = llm.generate(PROMPT, params("it"))[0]
        assert (again.token_ids, again.usage.stats.reused_tokens) == (expected["large"], 0)
        llm.unload_adapter("it")
        llm.load_adapter("other", place)
        assert llm.generate(PROMPT, params("other"))[0].usage.stats.reused_tokens >= 128  # the same bytes, whatever they are called


def test_what_cannot_be_loaded_changes_nothing(base, paths, expected, tmp_path):
    with LLM(base, **SETTINGS) as llm:
        llm.load_adapter("small", paths["small"])
        wrong = write_peft(tmp_path / "wrong", random_changes({"model.layers.0.mlp.up_proj.weight": (8, 8)}), target_modules=["up_proj"])
        nan = random_changes(shapes_of(base), 5)
        next(iter(nan.values())).b[0, 0] = np.nan
        cases = [
            ("small", paths["large"], AdapterError, "already: unload it first"),
            ("x", tmp_path / "none", AdapterError, "no adapter at"),
            ("x", wrong, AdapterError, "for another model"),
            ("x", write_peft(tmp_path / "nan", nan), AdapterError, "NaN"),
            ("a/b", paths["large"], SettingError, "cannot be a name"),
        ]
        for name, path, kind, words in cases:
            with pytest.raises(kind, match=words):
                llm.load_adapter(name, path)
        with pytest.raises(AdapterError, match="no adapter called 'x' is loaded; there are small"):
            llm.unload_adapter("x")
        assert llm.adapters == ("small",)
        assert answer(llm, "small") == expected["small"]
        llm.unload_adapter("small")
        with pytest.raises(AdapterError, match="the model has none"):
            llm.unload_adapter("small")


def test_next_to_running_requests_of_asyncio(base, paths, expected):
    """One joins and another leaves while answers are written, and all are what they are alone."""

    async def go() -> None:
        async with AsyncLLM(base, **SETTINGS) as llm:
            await llm.load_adapter("small", paths["small"])

            async def asked(name: str | None) -> list[int]:
                return (await llm.generate(PROMPT, params(name)))[0].token_ids

            first = [asyncio.ensure_future(asked(name)) for name in ("small", None, "small")]
            await llm.load_adapter("large", paths["large"])
            second = [asyncio.ensure_future(asked(name)) for name in ("large", "small")]
            await asyncio.gather(*first)
            assert (await asyncio.gather(*second)) == [expected["large"], expected["small"]]
            stream = llm.stream(PROMPT, params("small"))
            tokens = list((await anext(stream)).token_ids)
            await llm.unload_adapter("small")
            assert llm.adapters == ("large",)
            tokens += [token async for chunk in stream for token in chunk.token_ids]
            assert tokens == expected["small"]
            with pytest.raises(SamplingError, match="none called 'small'"):
                await asked("small")
            with pytest.raises(AdapterError, match="already"):
                await llm.load_adapter("large", paths["large"])
            assert await asked("large") == expected["large"]
            assert not llm._opened_now.adapters.adapted.leaving

    asyncio.run(go())


def test_a_request_on_its_way_when_its_adapter_is_unloaded(base, paths):
    """It was described before, and has not reached the engine."""
    with LLM(base, **SETTINGS) as llm:
        llm.load_adapter("small", paths["small"])
        stream = llm.stream(PROMPT, params("small"))
        llm.unload_adapter("small")
        with pytest.raises(SamplingError, match="'small' was unloaded before the request began"):
            next(stream)
        assert len(answer(llm, None)) == 16
