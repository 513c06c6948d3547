"""The pairs of held and free answers, on a tiny model."""

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from benchmarks.structured import pairs, table


@pytest.mark.long
def test_pairs_of_a_tiny_model(tmp_path):
    found = pairs(str(tiny_directory(tmp_path / "tiny", characters=JSON_CHARACTERS)), 1)
    assert [pair.work for pair in found] == ["texts, 1 at once", "texts, 8 at once", "arguments of a call, with drafts"]
    for pair in found:
        assert pair.free.tokens > 0
        assert min(pair.free.wall_ms, pair.held.wall_ms, pair.held.cpu_ms) > 0
    assert found[-1].held.steps <= found[-1].held.tokens  # how often drafts are tried depends on what they cost here
    assert table(found).count("\n") == 5
