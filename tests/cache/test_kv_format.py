"""Names of cache formats, and which layers they reach."""

import pytest

from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.kernels_metal.formats import BITS, v_group


@pytest.mark.parametrize(
    ("text", "keys", "values"), [("16", 16, 16), ("4", 4, 4), ("k8v4", 8, 4), (" K6V5 ", 6, 5), ("k16v2", 16, 2), ("k3v3", 3, 3), (8, 8, 8)]
)
def test_parsed(text, keys, values):
    form = KVFormat.parse(text)
    assert (form.k_bits, form.v_bits, form.first16) == (keys, values, False)
    assert KVFormat.parse(form.name) == form


@pytest.mark.parametrize("text", ["", "7", "1", "32", "k8", "v4", "k8v7", "k8v4x", "4.5", "-4", "k4 v4", "4,4", "q8_0", "k٤v٤", 0, None])
def test_what_does_not_exist_is_refused_with_what_does(text):
    with pytest.raises(UnsupportedModelError) as error:
        KVFormat.parse(text)
    assert "16, 8, 6, 5, 4, 3 or 2" in str(error.value)
    assert "\n" not in str(error.value)


def test_bits_are_checked_however_they_come():
    for bits in (1, 7, 32, 0, -8):
        with pytest.raises(UnsupportedModelError):
            KVFormat(bits, 8)
        with pytest.raises(UnsupportedModelError):
            KVFormat(8, bits)


def test_a_first_page_apart_makes_sense_only_beside_quantized_ones():
    assert KVFormat.parse("4", first16=True).first16
    with pytest.raises(UnsupportedModelError, match="kv_first16 needs kv 8, 4 or k8v4"):
        KVFormat.parse("16", first16=True)


@pytest.mark.parametrize(
    ("dim", "group"), [(8, 8), (64, 64), (80, 40), (96, 48), (112, 56), (128, 64), (192, 64), (256, 64), (512, 64), (88, 8)]
)
def test_groups_of_values(dim, group):
    assert v_group(dim) == group


@pytest.mark.parametrize(("keys", "values", "reached"), [(64, 64, True), (192, 128, True), (20, 64, False), (64, 33, False)])
def test_heads_that_cannot_be_quantized_stay_at_16_bits(keys, values, reached):
    form, spec = KVFormat(8, 4, first16=True), AttentionSpec(2, keys, values)
    assert form.for_layer(spec) == (form if reached else KVFormat(16, 16, first16=True))


def test_every_bits_has_a_name_that_is_read_again():
    for keys in BITS:
        for values in BITS:
            assert KVFormat.parse(KVFormat(keys, values).name) == KVFormat(keys, values)
