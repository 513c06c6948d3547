"""Who gets which blocks, and what the way between machines costs."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.distributed.cost import Interconnect, Job, pipeline_bytes, pipeline_tokens_s, tensor_bytes, tensor_tokens_s
from mlxinfer.distributed.nodes import Host, Nodes
from mlxinfer.distributed.plan import allowed_cuts, best_cuts, plan_split
from mlxinfer.distributed.preflight import check_machines, plan_lines
from mlxinfer.errors import MLXInferError, NodesError
from mlxinfer.loading.load import prepare

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
NODES = Nodes((Host("10.0.0.1", 1, "one"), Host("10.0.0.2", 2, "two")))


def fullest(costs, first, memory, cuts):
    """The greatest part of its memory that a rank uses, by the definition."""
    used = [sum(costs[begin:end]) for begin, end in itertools.pairwise(cuts)]
    used[0] += first
    return max(size / room for size, room in zip(used, memory, strict=True))


@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=8),
    st.integers(0, 9),
    st.lists(st.integers(60, 200), min_size=2, max_size=3),
    st.data(),
)
def test_no_other_cut_leaves_more_room(costs, first, memory, data):
    allowed = [True, *data.draw(st.lists(st.booleans(), min_size=len(costs) - 1, max_size=len(costs) - 1))]
    places = [at for at in range(1, len(costs)) if allowed[at]]
    others = [[0, *chosen, len(costs)] for chosen in itertools.combinations(places, len(memory) - 1)]
    if not others:
        with pytest.raises(NodesError, match="too few"):
            best_cuts(costs, first, memory, allowed)
        return
    cuts = best_cuts(costs, first, memory, allowed)
    assert cuts in others
    assert fullest(costs, first, memory, cuts) == min(fullest(costs, first, memory, each) for each in others)


def test_what_does_not_fit_is_refused_with_both_sizes():
    with pytest.raises(NodesError, match=r"need 4\.1 GB, and they have 3 GB together"):
        best_cuts([10**9] * 4, 10**8, [10**9, 2 * 10**9], [True] * 4)


def test_a_larger_machine_gets_more_blocks():
    with prepare(GOLDEN / "llama") as found:
        small, large = plan_split(found, KVFormat(), [10**7, 10**8]).parts
        assert (small.last - small.first, large.last - large.first) == (1, 2)
        assert sum(plan_split(found, KVFormat(), [10**7, 10**8]).weights) == found.weight_bytes


def test_blocks_stay_with_the_pages_that_they_read():
    """Gemma 4's last layers read the pages of earlier ones: no cut may come between."""
    with prepare(GOLDEN / "gemma4_text_shared") as found:
        cuts = allowed_cuts(found.model)
        assert not all(cuts)
        for at in range(1, len(cuts)):
            earlier = {block.mixer.layer for block in found.model.blocks[:at]}
            assert cuts[at] == earlier.isdisjoint({block.mixer.layer for block in found.model.blocks[at:]})


REPORT = {"versions": {"mlxinfer": "1", "mlx": "2"}, "usable_bytes": 10**9, "device": "M"}


def test_doctor_tells_of_machines_and_plan():
    machines = check_machines(NODES, lambda node: json.dumps(REPORT))
    assert [machine.line() for machine in machines] == [
        f"rank {rank} ({name}): M, 1 GB may be used, mlxinfer 1, mlx 2" for rank, name in enumerate(("one", "two"))
    ]
    first, second, way = plan_lines(str(GOLDEN / "llama"), KVFormat(), NODES, machines)
    assert first.startswith("rank 0 (one): blocks 0 to 0, embedding and head")
    assert second.startswith("rank 1 (two): blocks 1 to 2,")
    assert "(computed)" in way


def test_doctor_tells_what_is_wrong_with_a_machine():
    def ask(node):
        if node.name == "one":
            return json.dumps(REPORT)
        raise OSError("Connection refused")

    assert check_machines(NODES, ask)[1].line() == "rank 1 (two): cannot be asked: Connection refused"
    other = REPORT | {"versions": {"mlxinfer": "0.9", "mlx": "2"}}
    machines = check_machines(NODES, lambda node: json.dumps(REPORT if node.name == "one" else other))
    assert machines[1].problem == "rank 0 has mlxinfer 1: install the same"
    with pytest.raises(MLXInferError, match="not all machines"):
        list(plan_lines(str(GOLDEN / "llama"), KVFormat(), NODES, machines))


JOB = Job(hidden=4096, blocks=32, row_bytes=2, weights=(4e9, 4e9), bandwidth=(400e9, 400e9))


def test_links_cost_what_was_injected():
    free = Interconnect("none", 0.0, float("inf"))
    assert pipeline_tokens_s(JOB, free) == pytest.approx(400 / 8)
    assert tensor_tokens_s(JOB, free) == pytest.approx(400 / 4)
    slow = Interconnect("slow", 1e-3, 8192e3)  # 1 ms, and 1 ms more for a row
    assert 1 / pipeline_tokens_s(JOB, slow) == pytest.approx(0.02 + 2 * 2e-3)
    assert 1 / tensor_tokens_s(JOB, slow) == pytest.approx(0.01 + 65 * 2 * 1.5e-3)
    assert pipeline_bytes(JOB) == 2 * 8192
    assert tensor_bytes(JOB) == 2 * 65 * 8192
