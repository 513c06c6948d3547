from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.kv_bytes import CONTEXTS, SHAPES, layer_bytes, step_bytes
from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat

ROOT = Path(__file__).parents[2]


def test_a_layer_by_hand() -> None:
    spec = AttentionSpec(kv_heads=2, key_dim=64, value_dim=128)
    open_page = 2 * 32 * (64 + 128) * 2
    keys, values = 64 * 64 // 2 + 2 * 64 * 2, 64 * 128 + 2 * 64 * 2 * 2
    assert layer_bytes(spec, 32 + 3 * 64, KVFormat(4, 8)) == 2 * 3 * (keys + values) + open_page
    assert layer_bytes(spec, 32 + 3 * 64, KVFormat()) == 7 * open_page


def test_a_window_bounds_what_is_read() -> None:
    sliding = AttentionSpec(4, 256, 256, window=1024)
    assert layer_bytes(sliding, 4096, KVFormat()) == layer_bytes(sliding, 131072, KVFormat())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("context", CONTEXTS)
def test_four_bits_are_at_most_three_tenths_and_eight_at_most_55_hundredths(shape, context) -> None:
    plain = step_bytes(shape, context, KVFormat())
    assert step_bytes(shape, context, KVFormat(4, 4)) <= 0.30 * plain
    assert step_bytes(shape, context, KVFormat(8, 8)) <= 0.55 * plain


def test_the_documentation_has_what_the_command_prints() -> None:
    done = CliRunner().invoke(main, ["kv-bytes"])
    assert done.exit_code == 0
    assert done.output in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
