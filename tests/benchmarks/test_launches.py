"""What a step costs on an Apple GPU, counted without one. Counting runs in processes of its own: it pretends that there is a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from support.processes.once_per_run import once_per_run

from benchmarks.launches import chips, cost, layout, products, report
from benchmarks.launches.command import counted as count
from benchmarks.launches.count import lowered
from benchmarks.launches.graph import Node
from benchmarks.launches.layout import Laid
from benchmarks.launches.ledger import Ledger
from benchmarks.launches.phantom import PhantomGPU
from benchmarks.launches.primitives import Architecture, Launch
from benchmarks.launches.programs import trusted_kernels
from mlxinfer.kernels_metal import executors, kept_trials
from mlxinfer.kernels_metal.kernel_trial import KernelTrial, Speed

ROOT = Path(__file__).parents[2]
M1, M4 = Architecture(13, "g"), Architecture(16, "g")


NO_GCC = "" if shutil.which("g++") else "there is no g++, without which MLX fuses nothing that could be counted"
needs_gcc = pytest.mark.skipif(bool(NO_GCC), reason=NO_GCC)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory):
    if NO_GCC:
        pytest.skip(NO_GCC)
    return once_per_run(tmp_path_factory, "launches", lambda: count(["--ceilings"]))


@pytest.mark.long
def test_no_layer_costs_more_launches_than_before(counted) -> None:
    """`python -m benchmarks.launches.count --lower` lowers the ceilings when launches are saved; raise one only with a reason."""
    for name, pasts in counted["limits"]["layer"].items():
        for past, limit in pasts.items():
            now = counted["now"]["layer"][name][past]
            assert now["launches"] <= limit["launches"], f"{name} after {past} tokens: {now}, at most {limit}"
            assert now["stages"] <= limit["stages"], f"{name} after {past} tokens: {now}, at most {limit}"


@pytest.mark.long
def test_no_step_writes_more_than_before(counted) -> None:
    for rows, limit in counted["limits"]["written"].items():
        assert counted["now"]["written"][rows] <= limit, f"{rows} rows"


@pytest.mark.long
def test_no_prompt_drains_the_gpu_more_often_than_before(counted) -> None:
    for tokens, limit in counted["limits"]["prompt"].items():
        assert counted["now"]["prompt"][tokens]["drains"] <= limit["drains"], tokens


@pytest.mark.long
def test_the_ceilings_are_near_what_there_is(counted) -> None:
    """A ceiling far above would let launches come back unseen."""
    for name, pasts in counted["limits"]["layer"].items():
        for past, limit in pasts.items():
            assert limit["launches"] < counted["now"]["layer"][name][past]["launches"] + 2, "python -m benchmarks.launches.count --lower"


@needs_gcc
def test_afterwards_mlx_computes_where_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    before = mx.default_device()
    with PhantomGPU():
        assert chosen == [mx.cpu]
    assert chosen == [mx.cpu, before]


def test_kernels_are_neither_measured_nor_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The time of a kernel that computes nothing would decide at random."""
    calls: list[object] = []
    monkeypatch.setattr(executors, "measurable", lambda: True)
    monkeypatch.setattr(executors, "kind", lambda: "Metal")
    monkeypatch.setattr(kept_trials, "trials_file", lambda: tmp_path / "trials.json")
    trial = KernelTrial("sums", lambda: "its answers are zeros", speeds=lambda: calls.append(1) or {1: Speed(0.1)}, listed=False)
    with trusted_kernels():
        assert trial.obstacle() is None
    assert not calls
    assert not list(tmp_path.iterdir())


def test_ceilings_only_come_down() -> None:
    limits, now = {"a": {"b": 3, "c": 5}}, {"a": {"b": 4.0, "c": 4.5}}
    assert lowered(limits, now) == {"a": {"b": 3, "c": 4.5}}
    assert lowered(limits, {"a": {"b": 2.0, "c": 9.0}}) == {"a": {"b": 2, "c": 5}}


@pytest.mark.long
@needs_gcc
def test_the_hosts_time_is_of_built_and_of_replayed_steps() -> None:
    """Counting fails if MLX does not replay the steps of a measurement."""
    pytest.importorskip("mlx_lm")
    found = count(["smollm2", "--host", "--layers", "1", "--past", "64"])
    assert [list(times) for times in found.values()] == [["mlxinfer", "mlxinfer, replayed", "mlx-lm"]] * 3
    assert all(us > 0 for times in found.values() for us in times.values())


def test_the_table_of_the_hosts_times() -> None:
    text = report.host_times({"a": {"1": {"mlxinfer": 2500.0, "mlxinfer, replayed": 700.0, "mlx-lm": 1900.0}}}, "a processor")
    assert "measured on this machine (a processor) without a GPU" in text
    assert text.splitlines()[-1] == "| a | 1 | 2.50 | 0.70 | 1.90 |"


_MLX_LM = """
from benchmarks.launches.phantom import PhantomGPU
with PhantomGPU() as gpu:
    import json
    from benchmarks.launches.count import layer, with_layers
    from benchmarks.launches.ledger import total
    from benchmarks.launches.models import subject
    from benchmarks.launches.programs import MLXLM, Ours
    model = with_layers(subject("smollm2", 4), 4)
    found = [layer(lambda m: MLXLM(gpu, m), model, rows, 256) for rows in (1, 4)]
    short = with_layers(model, 2)
    steps = {kind.__name__: total(kind(gpu, short).decode(1, 256, 2)[0].graphs[:1]) for kind in (MLXLM, Ours)}
    print(json.dumps([found, {k: [v.matrix, v.distinct] for k, v in steps.items()}]))
"""


@pytest.mark.long
@needs_gcc
def test_mlx_lms_layers_and_the_bytes_of_both() -> None:
    """17 launches, 12 after one another: norm, three products, two rotations, two cache updates, attention, product, sum; norm, two
    products, gate, product, sum. Both programs read the same weights."""
    pytest.importorskip("mlx_lm")
    done = subprocess.run([sys.executable, "-c", _MLX_LM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    layers, steps = json.loads(done.stdout)
    assert layers == [[17, 12, 0], [17, 12, 0]]
    hidden, inner, heads, vocab = 576, 1536, 15, 49152
    weights = 2 * (hidden * hidden * 2 + hidden * 6 * 64 + 3 * hidden * inner) + vocab * hidden
    assert steps["MLXLM"][0] == steps["Ours"][0] == weights * 4.5 / 8
    assert heads == 9 + 2 * 3
    assert steps["Ours"][1] < 1.02 * steps["MLXLM"][1]


_ALL = """
import sys
from benchmarks.launches.phantom import PhantomGPU
with PhantomGPU() as gpu:
    from benchmarks.launches.count import with_layers
    from benchmarks.launches.ledger import total
    from benchmarks.launches.models import published, subject
    from benchmarks.launches.programs import Ours
    for name in published():
        model = with_layers(subject(name, 4), 4)
        program = Ours(gpu, model, sys.argv[1])
        turns = [*program.decode(2, 100, 2), program.prefill(200)]
        found = total(graph for turn in turns for graph in turn.graphs)
        print(name, found.count, found.names["paged_attention_prefill"], found.names["seal_keys"])
"""


_WITHOUT = {"glm-4.7-flash", "granite-4.0-h-small", "kimi-linear-48b", "nemotron-3-nano"}


@pytest.mark.parametrize("kv", ["4", "16"])
@needs_gcc
@pytest.mark.slow
def test_every_published_model_is_counted(kv: str) -> None:
    """No primitive is without a rule, with a plain cache and with a quantized one."""
    done = subprocess.run([sys.executable, "-c", _ALL, kv], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == len({name for name, *_ in found}) > 10
    assert all(int(count) > 100 for _, count, _, _ in found)
    # Without are those whose first layers have no attention, or none with a kernel.
    without = {name for name, _, _, sealed in found if int(sealed) == 0}
    assert without == ({name for name, *_ in found} if kv == "16" else _WITHOUT)


def _product(rows: int, gpu: Architecture, columns: int = 4096, width: int = 14336) -> list[Launch]:
    shapes = [((rows, columns), mx.bfloat16), ((width, columns // 8), mx.uint32), ((width, columns // 64), mx.bfloat16)]
    inputs = [Laid(shape, dtype, layout.rows(shape)) for shape, dtype in [*shapes, shapes[2]]]
    node = Node("QuantizedMatmul", [64, 4, "affine", True], [], [], {})
    return products.quantized(node, inputs, [Laid((rows, width), mx.bfloat16, (width, 1))], gpu)[0]


def test_few_rows_read_a_quantized_matrix_as_often_as_mlxs_kernels_do() -> None:
    once = 4096 * 14336 * 4.5 / 8
    assert [_product(rows, M1)[0].matrix / once for rows in (1, 2, 5)] == [1, 2, 5]
    assert [_product(rows, M4)[0].matrix / once for rows in (1, 2, 5, 8)] == [1, 1, 1, 2]
    tiles = _product(64, M4)[0]
    assert (tiles.matrix / once, tiles.on_matrix_units, tiles.operations) == (2, True, 2 * 64 * 4096 * 14336)
    assert all(launch.reads - launch.repeated < 1.05 * once for rows in (1, 5, 8) for launch in _product(rows, M1))


def test_half_of_a_joined_product_is_copied_for_the_next_one() -> None:
    """At one row too: MLX compares the stride of the only row with the row's length."""
    inputs = [Laid((1, 64), mx.bfloat16, (128, 1)), *(Laid(s, mx.uint32, layout.rows(s)) for s in ((64, 8), (64, 1), (64, 1)))]
    node = Node("QuantizedMatmul", [64, 4, "affine", True], [], [], {})
    launches, _ = products.quantized(node, inputs, [Laid((1, 64), mx.bfloat16, (64, 1))], M4)
    assert [launch.name for launch in launches] == ["copy for QuantizedMatmul", "QuantizedMatmul"]
    assert launches[1].stage == 2


def test_views_keep_track_of_strides() -> None:
    array = Laid((2, 3, 4), mx.float32, (12, 4, 1))
    turned = layout.transposed(array, [1, 0, 2])
    assert (turned.strides, turned.in_rows, turned.dense) == ((4, 12, 1), False, True)
    assert layout.reshaped(turned, (6, 4)) is None
    part = layout.sliced(array, (2, 3, 2), (1, 1, 1))
    assert (part.in_rows, part.dense) == (False, False)
    assert layout.reshaped(part, (6, 2)) == Laid((6, 2), mx.float32, (4, 1))
    wide = layout.broadcast(Laid((1, 4), mx.float32, (4, 1)), (5, 4))
    assert (wide.strides, wide.bytes) == ((0, 1), 16)
    numpy_free = mx.zeros((2, 3, 4))[:, :, :2]
    assert tuple(memoryview(numpy_free).strides) == tuple(4 * s for s in part.strides)


def test_seconds_by_hand() -> None:
    chip = next(chip for chip in chips.CHIPS if chip.name == "M4 Max")
    assert chip.bandwidth == 546e9
    streams = Launch("x", 546_000_000, 0, 1)
    again = Launch("x", 2 * 546_000_000, 0, 1, repeated=546_000_000)
    assert cost.launch_s(streams, chip) == cost.launch_s(again, chip) == pytest.approx(1e-3 / cost.BANDWIDTH_SHARE)
    two = Ledger((streams, streams), 1)
    for stage in cost.STAGE_S:
        assert cost.seconds(two, chip, stage, drains=2, host_s=1e-3) == pytest.approx(
            2e-3 / cost.BANDWIDTH_SHARE + stage + cost.PARALLEL_S + 2 * cost.DRAIN_S + 1e-3
        )
    tiles = Launch("x", 0, 0, 1, operations=10**12, on_matrix_units=True)
    m5 = next(chip for chip in chips.CHIPS if chip.name == "M5 Max")
    assert cost.launch_s(tiles, chip) / cost.launch_s(tiles, m5) == pytest.approx(m5.matrix * m5.clock / chip.clock)


def test_the_slower_of_gpu_and_host_decides() -> None:
    """Two programs on one chip: eight rows, 4 or 2 ms of the GPU by the cost of a stage, and 1 or 3 ms of the host."""
    fast, slow = ({"program": name, "work": "decode 8", "seconds": {"M4": [2e-3, 4e-3]}, "host_us": us} for name, us in
                  (("mlxinfer", 1000.0), ("mlx-lm", 3000.0)))  # fmt: skip
    assert report.speed([fast, slow], "mlxinfer", "decode 8", "M4", 0) == pytest.approx([2000, 4000])
    assert report.speed([fast, slow], "mlx-lm", "decode 8", "M4", 0) == pytest.approx([2000, 8 / 3e-3])
    assert [report.host_decides([fast, slow], name, "decode 8", "M4") for name in report.PROGRAMS] == [False, True]


def test_every_chip_has_a_bandwidth_that_its_maker_states() -> None:
    assert len({chip.name for chip in chips.CHIPS}) == len(chips.CHIPS) == 18
    assert all(60e9 < chip.bandwidth < 1e12 for chip in chips.CHIPS)


@pytest.mark.long
@needs_gcc
def test_blocks_of_vision_towers() -> None:
    """SigLIP: norm, joined product, attention, product, sum; norm, product, GELU, product, sum. Qwen3-VL turns queries and keys as well:
    two halves each, joined."""
    command = [sys.executable, "-m", "benchmarks.launches.towers", "smolvlm-256m", "qwen3-vl-2b"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["block"], each["block_stages"]) for each in found] == [(10, 10), (18, 12)]
    assert found[0]["names"] == {"LayerNorm": 2, "AddMM": 4, "SDPA": 1, "Compiled": 1, "Add": 2}
