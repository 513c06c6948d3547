"""Descriptions of a cache for people."""

import mlx.core as mx
import pytest

from mlxinfer.cache import kv_format as quality
from mlxinfer.cache.attention.select import attention_lines
from mlxinfer.cache.base import AttentionSpec, OpaqueSpec, RecurrentSpec
from mlxinfer.cache.kv_format import KVFormat, MeasuredLoss, layer_lines, loss_line, unquantized_lines

FULL, WINDOW, ODD, STATE = AttentionSpec(2, 64, 64), AttentionSpec(2, 64, 64, 512), AttentionSpec(2, 20, 64), RecurrentSpec(((3,),))
OPAQUE = OpaqueSpec(lambda: None)
MIXED = [STATE, FULL, STATE, STATE, WINDOW, ODD]


def test_layers_that_are_kept_alike_share_a_line():
    assert layer_lines([FULL, WINDOW, WINDOW, FULL, WINDOW], KVFormat(8, 4), mx.bfloat16) == [
        "layers 0, 3: keys and values of the whole context, keys 8 bits, values 4 bits",
        "layers 1-2, 4: keys and values of a window of 512 tokens, keys 8 bits, values 4 bits",
    ]


def test_what_is_not_quantized_says_why():
    lines = layer_lines(MIXED, KVFormat(4, 4, first16=True), mx.bfloat16)
    assert lines[0].startswith("layers 0, 2-3: a recurrent state in float32")
    assert lines[0].endswith("never quantized")
    assert lines[1] == "layer 1: keys and values of the whole context, 4 bits, a sequence's first page bfloat16"
    assert lines[3] == "layer 5: keys and values of the whole context, bfloat16 (not quantized: head size 20 and 64 is not a multiple of 8)"
    assert "mlx-lm's own cache" in layer_lines([OPAQUE], KVFormat(), mx.float16)[0]


@pytest.mark.parametrize(
    ("layers", "kv", "said"),
    [(MIXED, KVFormat(), 0), (MIXED, KVFormat(4, 4), 4), ([FULL, WINDOW], KVFormat(4, 4), 0), ([ODD], KVFormat(8, 8), 1)],
)
def test_only_exceptions_are_told_at_load(layers, kv, said):
    assert len(unquantized_lines(layers, kv, mx.float32)) == said


def test_every_attention_layer_has_its_way():
    lines = attention_lines(MIXED, KVFormat(4, 4), mx.float32)
    assert len(lines) == 1
    assert lines[0].startswith("layers 1, 4-5: ")


def test_a_loss_is_told_as_it_was_measured(monkeypatch):
    assert loss_line(KVFormat()) is None
    monkeypatch.setattr(quality, "MEASURED", {"4": (MeasuredLoss("SmolLM2-135M", 0.0087, 0.951),)})
    assert "SmolLM2-135M: KL 0.0087, 95.1% the same top token" in str(loss_line(KVFormat(4, 4)))
    assert "has not been measured" in str(loss_line(KVFormat(3, 4)))


def test_only_formats_that_exist_have_measurements():
    for name, losses in quality.MEASURED.items():
        assert KVFormat.parse(name).name == name
        assert all(loss.kl >= 0 and 0 < loss.top1 <= 1 for loss in losses)
