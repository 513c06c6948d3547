"""Metal files as they are laid out: kernels are found with their parameters, includes are taken in once."""

from __future__ import annotations

import re

import pytest

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


def test_an_unknown_kernel_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="seal_keys, seal_values"):
        load("seal_page/seal_page.metal", "seal")
