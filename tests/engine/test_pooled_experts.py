"""Experts in pools: every answer is, token for token, that of the model with all experts in memory."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.engines.drafting import Free
from support.engines.sparse_tiny import FAMILIES, FORMS, sparse_tiny
from support.models.adapters import random_changes, shapes_of, write_peft
from support.models.heads import HEAD, head_directory
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, Regex, SamplingParams
from mlxinfer import kernels_cpu as kernels
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.errors import ExpertReadError, WeightsError
from mlxinfer.expert_offload import ExpertStore
from mlxinfer.kernels_cpu import native
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.repack_cache import pooled_experts
from mlxinfer.loading.repack_cache.pooled_experts import PooledExperts

GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
LONG = [(i * 7) % 90 + 3 for i in range(100)]
PROMPTS = [LONG, [5, 6, 7], [*LONG[:70], 9], [3, 4]]
LITTLE = 1e-6
"""GB of pools: as few slots as there can be."""
PATHS = ["kernels", "plain"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the CPU kernels, or in plain MLX as on a GPU."""
    if request.param == "plain":
        monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(None, "switched off"))
    elif not kernels.can_run_waves():
        pytest.skip(kernels.status())
    return str(request.param)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    known: dict[tuple[str, str], Path] = {}

    def find(family: str, form: str) -> Path:
        if (family, form) not in known:
            known[family, form] = sparse_tiny(tmp_path_factory.mktemp("sparse") / family, family, form)
        return known[family, form]

    return find


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[Any]:
    found = llm.generate(prompts, SamplingParams(**(GREEDY | params)))
    return [(answer.token_ids, answer.finish_reason) for answer in found]


def both(model: Path, use: Callable[[LLM], Any], **settings: Any) -> Any:
    """Return what `use` returns of the resident model, after a comparison with the same of the model with the fewest slots."""
    found = []
    for memory in (0, LITTLE):
        options = {key: value / str(memory) if isinstance(value, Path) else value for key, value in settings.items()}
        llm = LLM(str(model), experts_memory=memory, **{"max_context": 256, **options})
        try:
            if memory:
                pools = llm.loaded.experts
                assert pools is not None
                pools.resize_to(0)
            found.append(use(llm))
            if memory:
                assert pools.store.stats().misses > 0
        finally:
            llm.close()
    assert found[1] == found[0]
    return found[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_resident_model(directory, family: str, form: str, path: str) -> None:
    found = both(directory(family, form), generate)
    assert all(len(tokens) == 12 for tokens, _ in found)


def twice(llm: LLM) -> Any:
    """The second time, prompts are found in the prefix cache."""
    return generate(llm, PROMPTS[:2]), generate(llm)


def drafting(llm: LLM) -> Any:
    """Drafts in every step, whatever they cost."""
    proposer = llm.engine.proposer
    proposer.times, proposer.account.share = Free(), 1e9
    if proposer.draft is not None:
        proposer.draft.cost = 1e-4  # type: ignore[attr-defined]
    found = generate(llm, [[*LONG[:20], *LONG[:20]], LONG], max_tokens=24)
    assert llm.engine.stats().drafted_tokens > 0
    return found


def preempting(llm: LLM) -> Any:
    """The last of several running sequences is preempted in every fifth step."""
    scheduler, steps = llm.engine.scheduler, itertools.count(1)
    schedule = scheduler.schedule

    def with_preemptions() -> Schedule:
        running = scheduler.running
        return Schedule(preempt=[running[-1]]) if not next(steps) % 5 and len(running) > 1 else schedule()

    scheduler.schedule = with_preemptions  # type: ignore[method-assign]
    found = generate(llm)
    assert llm.engine.stats().preemptions > 0
    return found


def resizing(llm: LLM) -> Any:
    """The pools grow and shrink between two calls; at last every expert is resident."""
    found = []
    for nbytes in (60_000, 0, 10**9, 0):
        if llm.loaded.experts is not None:
            llm.loaded.experts.resize_to(nbytes)
        found.append(generate(llm, PROMPTS[:2]))
    return found


def adapted(llm: LLM) -> Any:
    return [generate(llm, PROMPTS[:2], adapter=name) for name in ("one", None)], generate(llm, PROMPTS[1:], adapter="one")


def structured(llm: LLM) -> Any:
    return generate(llm, PROMPTS[1:3], ignore_eos=False, structure=Regex("[a-z]{3}[0-9]+x"))


def everything(llm: LLM) -> Any:
    """Batch, prefix cache, drafts, structures, adapters and forks at once."""
    first = generate(llm, PROMPTS[:2], adapter="one")
    kinds = [
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, adapter="one"),
        SamplingParams(**(GREEDY | {"temperature": 0.9}), seed=3, n=2),
        SamplingParams(max_tokens=12, temperature=0.0, structure=Regex("[a-z]{3}[0-9]+x")),
    ]
    found = llm.generate(PROMPTS, kinds)
    return first, [answer.token_ids for answer in found]


CELLS: dict[str, tuple[Callable[[LLM], Any], dict[str, Any]]] = {
    "prefix": (twice, {}),
    "prefix on disk": (twice, {"prefix_disk_gb": 0.1, "prefix_dir": Path("prefixes")}),
    "kv 8": (generate, {"kv": "8"}),
    "kv 4": (twice, {"kv": "4"}),
    "few sequences": (generate, {"max_num_seqs": 2}),
    "deterministic": (generate, {"deterministic": True}),
    "n-grams": (drafting, {"speculate": True}),
    "head": (drafting, {"draft": "head"}),
    "structure": (structured, {}),
    "adapter": (adapted, {"adapters": True}),
    "preemption": (preempting, {}),
    "forks": (lambda llm: generate(llm, PROMPTS[:2], n=3, temperature=0.9, seed=4), {}),
    "prompt logits": (lambda llm: llm.logits(LONG[:40]).tolist(), {}),
    "sizes": (resizing, {}),
    "everything": (everything, {"kv": "4", "speculate": True, "adapters": True}),
}


@pytest.mark.parametrize("cell", list(CELLS))
def test_every_row_works_with_pools(directory, tmp_path: Path, cell: str, path: str) -> None:
    use, settings = CELLS[cell]
    model = directory("qwen3_moe", "bfloat16")
    if settings.get("adapters"):
        changes = random_changes(shapes_of(model), 3, projections=["q_proj", "v_proj", "o_proj"], size=0.4)
        settings = settings | {"adapters": {"one": str(write_peft(tmp_path / "one", changes))}}
    if settings.get("draft"):
        settings = settings | {"draft": str(head_directory(tmp_path / "head", HEAD))}
    if settings.get("prefix_dir"):
        settings = settings | {"prefix_dir": tmp_path / "prefixes"}
    both(model, use, **settings)


def pools_of(llm: LLM) -> PooledExperts:
    found = llm.loaded.experts
    assert found is not None
    return found


class Disk:
    """Reads a file. With `left` >= 0, fails after so many reads, `times` times."""

    def __init__(self, store: ExpertStore) -> None:
        self.read, self.left, self.times = store._reader._read_into, -1, 10**9
        store._reader._read_into = self

    def __call__(self, descriptor: int, targets: Any, offset: int) -> int:
        if self.left == 0 and self.times > 0:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.left -= self.left > 0
        return self.read(descriptor, targets, offset)


@pytest.mark.parametrize("after", [0, 7, 40])
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_a_disk_that_fails_ends_the_running_answers_only(directory, model: str, after: int, path: str) -> None:
    llm = LLM(str(directory(model, "mlx 4 bits")), experts_memory=LITTLE, max_context=256, max_num_seqs=2)
    try:
        pools_of(llm).resize_to(0)
        want, disk = generate(llm), Disk(pools_of(llm).store)
        for _ in range(2):
            disk.left = after
            with pytest.raises(ExpertReadError, match=r"cannot read experts from .*Input/output error.*check the disk"):
                generate(llm)
            disk.left = -1
            assert generate(llm) == want  # nothing that the failed step wrote is found again
        assert llm.engine.idle
    finally:
        llm.close()


def test_waiting_requests_are_answered_after_a_fault(directory, path: str) -> None:
    """One request runs at a time: the first one ends with the error, the others with answers."""
    model = str(directory("qwen3_moe", "mlx 4 bits"))
    with LLM(model, experts_memory=0, max_context=256) as whole:
        want = [tokens for tokens, _ in generate(whole)]

    async def ask() -> list[Any]:
        async with AsyncLLM(model, experts_memory=LITTLE, max_context=256, max_num_seqs=1) as llm:
            pools = llm.loaded.experts
            assert pools is not None
            disk = Disk(pools.store)
            disk.left, disk.times = 3, 1
            return await asyncio.gather(*(llm.generate([prompt], SamplingParams(**GREEDY)) for prompt in PROMPTS), return_exceptions=True)

    first, *others = asyncio.run(asyncio.wait_for(ask(), 60))
    assert isinstance(first, ExpertReadError)
    assert [answers[0].token_ids for answers in others] == want[1:]


def test_a_gpu_reads_expected_experts_ahead(directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router of the next layer reads the rows before a layer's experts; answers do not depend on its predictions."""
    monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(None, "switched off"))
    monkeypatch.setattr(pooled_experts, "is_gpu", lambda: True)
    model = directory("gpt_oss", "mlx 4 bits")

    def use(llm: LLM) -> Any:
        found = generate(llm, PROMPTS[1:2])
        if llm.loaded.experts is not None:
            stats = llm.loaded.experts.store.stats()
            assert 0 < stats.predicted_used <= stats.predicted
        return found

    both(model, use)


def test_experts_are_read_from_the_checkpoint_once(directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    read: list[str] = []
    real = SafetensorsCheckpoint.read
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda self, name: read.append(name) or real(self, name))
    model = directory("qwen3_moe", "bfloat16")
    for time in range(2):
        read.clear()
        with LLM(model, experts_memory=LITTLE, max_context=256) as llm:
            assert llm.loaded.experts is not None
        routed = [name for name in read if ".mlp.experts." in name]
        assert bool(routed) == (time == 0)
        assert len(set(read)) == len(read)
        assert "model.layers.1.mlp.gate.weight" in read


def test_experts_with_infinite_values_are_not_kept(directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    shutil.copytree(directory("qwen3_moe", "bfloat16"), model)
    tensors = dict(mx.load(str(model / "model.safetensors")))
    name = next(name for name in tensors if "layers.1.mlp.experts" in name)
    tensors[name][0, 0] = mx.inf
    mx.save_safetensors(str(model / "model.safetensors"), tensors)
    for _ in range(2):  # the second time, nothing of the first is continued
        with pytest.raises(WeightsError, match="NaN or infinite"):
            LLM(model, experts_memory=LITTLE, max_context=256)


def test_a_closed_model_gives_its_pools_back(directory) -> None:
    llm = LLM(directory("qwen3_moe", "bfloat16"), experts_memory=LITTLE, max_context=256)
    pools = weakref.ref(pools_of(llm))
    generate(llm, PROMPTS[1:2])
    llm.close()
    gc.collect()
    assert pools() is None


OTHERS = ["mixtral", "minimax_m2", "deepseek_v3", "glm4_moe_lite", "gemma4_text_experts", "nemotron_h_experts", "lfm2_moe"]
OTHERS += ["qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "ernie4_5_moe", "kimi_linear", "deepseek_v2", "mistral4"]


@pytest.mark.long
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_work_with_pools(directory, family: str, path: str) -> None:
    both(directory(family, "bfloat16"), lambda llm: generate(llm, [LONG[:40], [5, 6, 7]], max_tokens=8))


def test_chunks_of_a_long_prompt_are_those_of_the_resident_model(tmp_path: Path, path: str) -> None:
    """Steps of a chunk sample nothing. They are waited for, since a failed read must be known."""
    model = tiny_directory(tmp_path / "model", "gpt_oss", context=1024)
    both(model, lambda llm: generate(llm, [LONG * 7, LONG[:9]], max_tokens=4), max_context=1024)
