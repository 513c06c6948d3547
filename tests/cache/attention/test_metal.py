"""Attention of the cache by the Metal kernels, in the emulator: against NumPy's idea of it, and as the engine runs it."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.emulated import emulated
from support.models.checkpoints import config_of, random_checkpoint
from support.models.tiny import open_model, random_tokens
from support.oracles.cache_sequences import Sequence, run_step
from support.processes.examples import examples

from mlxinfer.cache.attention import metal, prefill_choice, trial
from mlxinfer.cache.attention import select as backends
from mlxinfer.cache.attention.metal import METAL, MetalAttention
from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.attention.select import attention_backend, attention_lines, fallback_lines, gpu_status
from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.store import LayerStore
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence as Request
from mlxinfer.kernels_metal import emulator, kernel_trial
from mlxinfer.types import SamplingParams

SPECS = (AttentionSpec(2, 64, 64, query_heads=6), AttentionSpec(1, 80, 64, 70, query_heads=1), AttentionSpec(1, 64, 128, 10, query_heads=4))
TWO = SPECS[:2]
MOST = 300


@pytest.fixture
def on_a_mac(monkeypatch):
    """The choice of kernels as it is made there; they run in the emulator."""
    monkeypatch.delenv(backends.SWITCH, raising=False)
    monkeypatch.setattr(backends.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(kernel_trial, "is_gpu", lambda: True)
    trial.forget_trials()
    with emulated():
        yield
    trial.forget_trials()


@pytest.mark.emulator
@settings(max_examples=examples(4))
@given(
    st.sampled_from([KVFormat(), KVFormat(4, 4), KVFormat(8, 3, first16=True)]),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 8, 9, 130])), min_size=2, max_size=8),
    st.data(),
)
def test_any_cut_and_any_neighbours_give_the_same_rows(kv, moves, data):
    with emulated():
        cache = PagedCache(TWO, dtype=mx.float32, kv_cache_tokens=1 << 12, chunk=512, kv=kv, backend=lambda store: METAL)
        sequences = [Sequence(i, MOST, kv, TWO) for i in range(3)]
        slots = [cache.open() for _ in sequences]
        for who, count in moves:
            chosen = data.draw(st.permutations(range(3))) if data.draw(st.booleans()) else [who]
            counts = [count if i == who else data.draw(st.sampled_from([1, 1, 70])) for i in chosen]
            parts = [(sequences[i], slots[i], min(n, MOST - sequences[i].done)) for i, n in zip(chosen, counts, strict=True)]
            parts = [part for part in parts if part[2]]
            if parts:
                run_step(cache, parts)


@pytest.mark.emulator
@pytest.mark.parametrize(
    "kv",
    [KVFormat(), pytest.param(KVFormat(8, 8), marks=pytest.mark.long), KVFormat(5, 4, first16=True)],
    ids=lambda kv: kv.name,
)
def test_the_engine_runs_on_them(kv, on_a_mac, tmp_path):
    changes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config = config_of("gemma3_text", **changes)
    model = open_model(random_checkpoint(tmp_path / "m", config))
    tokens = random_tokens(150)

    def logits() -> np.ndarray:
        engine = Engine(model, EngineConfig(max_context=256, kv_cache_tokens=4096, max_num_batched_tokens=70), dtype=mx.float32, kv=kv)
        requests = [Request(tokens[:length], SamplingParams(), 0, length, wants_logits=True) for length in (150, 66)]
        for request in requests:
            engine.add(request)
        rows: dict[Request, list[np.ndarray]] = {request: [] for request in requests}
        while not engine.idle:
            for event in engine.step():
                rows[event.sequence].append(np.array(event.rows))
        assert {type(b) for _, b, _ in engine.cache._backends} == kinds
        return np.concatenate([row for request in requests for row in rows[request]])

    kinds = {MetalAttention}
    got = logits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(backends.SWITCH, "0")
        kinds = {PlainAttention}
        # A key that is rounded differently in its last bit can get the next code.
        errors = np.abs(got - logits())
    assert np.median(errors) < 2e-5
    assert errors.mean() < 1e-3


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("kv", "dtype", "specs"), [(KVFormat(), mx.float16, SPECS[1:]), (KVFormat(8, 6), mx.bfloat16, TWO)], ids=["16", "k8v6"]
)
def test_the_trial_is_passed(kv, dtype, specs, on_a_mac):
    for spec in specs:
        assert attention_backend(LayerStore(spec, dtype, kv)) is METAL
    assert attention_lines(specs, kv, dtype) == [f"layers 0-{len(specs) - 1}: Metal kernels"]
    assert fallback_lines(specs, kv, dtype) == []


@pytest.mark.emulator
@pytest.mark.parametrize("wrong", ["answers", "crash"])
def test_kernels_that_fail_their_trial_are_not_used(wrong, on_a_mac, monkeypatch):
    def broken(*arguments, **options):
        if wrong == "crash":
            raise RuntimeError("Unable to build metal library from source\nerror: no")
        answers, recent = real(*arguments, **options)
        return answers * 1.5, recent

    from mlxinfer.kernels_metal.paged_attention.launcher import AppendLaunch

    real = AppendLaunch.run
    monkeypatch.setattr(AppendLaunch, "run", broken)
    chosen = attention_backend(LayerStore(SPECS[0], mx.float32, KVFormat(4, 4)))
    assert isinstance(chosen, PlainAttention)
    lines = fallback_lines(SPECS[:1], KVFormat(4, 4), mx.float32)
    assert len(lines) == 1
    assert "failed their trial" in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.emulator
def test_a_prefill_kernel_that_does_not_compile_leaves_decode_in_use(on_a_mac, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("Unable to build metal library from source\nprogram_source:9: error: call to implicitly-deleted constructor")

    monkeypatch.setattr(metal, "paged_attention_prefill", broken)
    kv = KVFormat(4, 4)
    backend = attention_backend(LayerStore(SPECS[0], mx.float32, kv))
    assert isinstance(backend, MetalAttention)
    assert "implicitly-deleted" in backend.prefill_lost
    (line,) = fallback_lines(SPECS[:1], kv, mx.float32)
    assert "prefill kernel failed its trial" in line
    assert "plain MLX instead for prompts; decode keeps its kernels" in line
    assert "prompts in plain MLX" in attention_lines(SPECS[:1], kv, mx.float32)[0]
    assert fallback_lines(SPECS[:1], KVFormat(), mx.float32) == []  # MLX's attention reads 16-bit pages
    kernels = _rows_by(backend, kv)
    assert "paged_attention_decode" in kernels
    assert "unseal_pages" not in kernels
    monkeypatch.setattr(prefill_choice, "has_metal", lambda: True)
    monkeypatch.setattr(prefill_choice, "LEAST_ROWS", 20)
    monkeypatch.setattr(prefill_choice, "most_unsealed_bytes", lambda: 1 << 27)
    kernels = _rows_by(backend, kv)
    assert kernels.count("unseal_pages") == 2
    assert "paged_attention_decode" in kernels


def _rows_by(backend: MetalAttention, kv: KVFormat) -> list[str]:
    """Compare rows of prompts and of decode with NumPy's idea, and return the names of the kernels."""
    with emulator.count_bytes() as counts:
        cache = PagedCache(SPECS[:1], dtype=mx.float32, kv_cache_tokens=1 << 12, chunk=512, kv=kv, backend=lambda store: backend)
        first, second = (Sequence(seed, MOST, kv, SPECS[:1]) for seed in (1, 2))
        slots = cache.open(), cache.open()
        for one, other in ((130, 0), (1, 70), (1, 1), (12, 1)):
            run_step(cache, [(s, slot, n) for s, slot, n in zip((first, second), slots, (one, other), strict=True) if n])
    return [launch.kernel for launch in counts.launches]


@pytest.mark.emulator
def test_each_kernel_of_prompts_is_tried_for_itself(on_a_mac, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("error: no")

    monkeypatch.setattr(prefill_choice, "has_metal", lambda: True)
    monkeypatch.setattr(prefill_choice, "most_unsealed_bytes", lambda: 1 << 27)
    monkeypatch.setattr(metal, "unseal_pages", broken)
    monkeypatch.setattr(prefill_choice, "unsealing_is_faster", lambda shape: False)
    store = LayerStore(SPECS[0], mx.float32, KVFormat(4, 4))
    assert attention_backend(store) == METAL
    trial.forget_trials()
    monkeypatch.setattr(metal, "paged_attention_prefill", broken)
    backend = attention_backend(store)
    assert isinstance(backend, MetalAttention)
    assert not backend.unseals
    assert backend.prefill_lost


@pytest.mark.emulator
def test_a_step_that_fails_by_the_prefill_kernel_leaves_decode_in_use(on_a_mac, monkeypatch):
    store = LayerStore(SPECS[0], mx.float32, KVFormat(4, 4))
    assert attention_backend(store) is METAL

    def broken(*arguments, **options):
        raise RuntimeError("[METAL] Command buffer execution failed: page fault")

    monkeypatch.setattr(metal, "paged_attention_prefill", broken)
    assert backends.disable_attention_kernels([(store, METAL)], RuntimeError("page fault"))
    assert isinstance(backend := attention_backend(store), MetalAttention)
    assert "page fault" in backend.prefill_lost
    assert backends.disable_attention_kernels([(store, backend)], RuntimeError("again"))  # nobody fails now
    assert isinstance(attention_backend(store), PlainAttention)
    assert not backends.disable_attention_kernels([(store, backend)], RuntimeError("and again"))  # another cause: no endless repetition


@pytest.mark.emulator
def test_shapes_without_a_kernel_say_which_there_are(on_a_mac):
    odd, many = AttentionSpec(2, 44, 44, query_heads=4), AttentionSpec(1, 64, 64, query_heads=17)
    lines = fallback_lines([odd, many], KVFormat(4, 4), mx.float32)
    assert "multiples of 8" in lines[0]
    assert "1 to 16" in lines[1]
    assert "plain MLX" in attention_lines([odd], KVFormat(), mx.float32)[0]


@pytest.mark.slow  # a trial for 32 heads of 128; that of smaller ones is above
@pytest.mark.emulator
def test_the_trial_of_usual_heads_is_passed(on_a_mac):
    assert "passed their trial" in gpu_status()


@pytest.mark.emulator
def test_they_can_be_switched_off(on_a_mac, monkeypatch):
    for each in (trial.DECODE_TRIAL, trial.PREFILL_TRIAL):
        monkeypatch.setattr(each, "obstacle", lambda *kind: None)
    assert "passed their trial" in gpu_status()
    monkeypatch.setenv(backends.SWITCH, "0")
    assert backends.SWITCH in gpu_status()
    assert backends.SWITCH in attention_lines(SPECS[:1], KVFormat(), mx.float32)[0]


def test_a_machine_without_a_gpu_has_nothing_to_say(monkeypatch):
    monkeypatch.setattr(backends.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(kernel_trial, "is_gpu", lambda: False)
    assert gpu_status() == ""
    assert fallback_lines(SPECS, KVFormat(4, 4), mx.float32) == []
    assert attention_lines(SPECS[:1], KVFormat(4, 4), mx.float32) == ["layer 0: plain MLX"]
