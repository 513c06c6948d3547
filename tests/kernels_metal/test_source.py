"""Parsing of Metal files: kernels with their parameters, and includes, each inserted once."""

from __future__ import annotations

import re

import pytest

from mlxinfer.kernels_metal.cuda.translate import TOKENS
from mlxinfer.kernels_metal.source import ROOT, load

KERNELS = re.compile(r"^//: kernel (\w+)", re.MULTILINE)
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.metal"))


def test_every_kernel_is_found_with_its_parameters() -> None:
    names = [(file, name) for file in FILES for name in KERNELS.findall((ROOT / file).read_text(encoding="utf-8"))]
    assert len(names) >= 4
    for file, name in names:
        source = load(file, name)
        assert source.inputs
        assert source.outputs
        for parameter in (*source.inputs, *source.outputs):
            assert re.search(rf"\b{parameter}\b", source.body), f"{name} does not use {parameter}"
        assert "//:" not in source.body
        assert "#include" not in source.header
        assert source.header.count("struct OnlineSoftmax {") <= 1


def test_comments_and_indentation_are_left_out_and_nothing_else() -> None:
    path = "paged_attention/decode/values.h"
    kept = load("paged_attention/paged_attention_decode.metal", "paged_attention_decode")
    assert "//" not in kept.header + kept.body
    assert "\n " not in kept.header + kept.body
    own = (ROOT / path).read_text(encoding="utf-8").split('sharing.h"\n')[1]
    start = kept.header.index("template <typename D, bool QUANTIZED>\ninline void weigh(")
    assert words(kept.header[start:]).startswith(words(own))
    body = (ROOT / "seal_page/seal_page.metal").read_text(encoding="utf-8").split("seals a token of a page.\n")[1]
    bare = load("seal_page/seal_page.metal", "seal_values").body
    assert words(bare) == words(body)
    assert bare.count("\n") == body.count("\n")


def words(code: str) -> str:
    return " ".join(m.group() for m in TOKENS.finditer(code) if m.lastgroup not in {"space", "comment"})


def test_an_unknown_kernel_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="seal_keys, seal_values"):
        load("seal_page/seal_page.metal", "seal")
