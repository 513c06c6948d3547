"""A drafter that reads pages which other machines have is refused before a weight is read."""

import pytest
from support.engines.tiny_engine import GOLDEN
from support.models.heads import assistant

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.distributed.plan import plan_shares, plan_split
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.load import prepare

MEMORY = [10**9, 10**9]


def test_by_heads_and_by_layers() -> None:
    with prepare(GOLDEN / "gemma4_text", mtp=assistant("gemma4_text")) as found:
        with pytest.raises(UnsupportedModelError, match="reads pages of its last layers, which other machines have: leave out --draft"):
            plan_shares(found, MEMORY)
        with pytest.raises(UnsupportedModelError, match="reads pages of its last layers"):
            plan_split(found, KVFormat(), MEMORY)
