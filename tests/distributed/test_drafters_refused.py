"""Drafters that read what other machines have are refused before a weight is read."""

from pathlib import Path

import pytest
from support.heads import EAGLE3, assistant, eagle3_directory
from support.tiny_engine import GOLDEN

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.distributed.plan import plan_shares, plan_split
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.load import prepare

MEMORY = [10**9, 10**9]


@pytest.mark.parametrize("kind", ["assistant", "eagle3"])
def test_by_heads_and_by_layers(kind: str, tmp_path: Path) -> None:
    eagle = kind == "eagle3"
    drafter = eagle3_directory(tmp_path / "drafter", EAGLE3) if eagle else assistant("gemma4_text")
    told = "reads rows between its blocks" if eagle else "reads pages of its last layers"
    with prepare(GOLDEN / ("llama" if eagle else "gemma4_text"), mtp=drafter) as found:
        with pytest.raises(UnsupportedModelError, match=rf"{told}, which other machines have: leave out --draft"):
            plan_shares(found, MEMORY)
        with pytest.raises(UnsupportedModelError, match=told):
            plan_split(found, KVFormat(), MEMORY)
