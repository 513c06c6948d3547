"""Parsing of Metal files: kernels with their parameters, and includes, each inserted once."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import source
from mlxinfer.kernels_metal.cuda.translate import TOKENS
from mlxinfer.kernels_metal.kernel_trial import KernelTrial, failed_trials
from mlxinfer.kernels_metal.source import ROOT, load, readable

KERNELS = re.compile(r"^//: kernel (\w+)", re.MULTILINE)
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.metal"))
KERNELS_OF_FILES = [(file, name) for name, file in source.all_kernels().items()]


def test_every_kernel_is_found_with_its_parameters() -> None:
    names = [(file, name) for file in FILES for name in KERNELS.findall((ROOT / file).read_text(encoding="utf-8"))]
    assert len(names) >= 4
    for file, name in names:
        found = load(file, name)
        assert found.inputs
        assert found.outputs
        for parameter in (*found.inputs, *found.outputs):
            assert re.search(rf"\b{parameter}\b", found.body), f"{name} does not use {parameter}"
        assert "//:" not in found.body
        assert "#include" not in found.header
        assert readable(found.header).count("struct OnlineSoftmax{") <= 1


@pytest.mark.parametrize(("file", "name"), KERNELS_OF_FILES)
def test_a_source_is_shorter_and_says_the_same(file: str, name: str) -> None:
    """`readable` gives names back, so the words of a body are those of its file, and those of a header are whole declarations."""
    short = load(file, name)
    text = (ROOT / file).read_text(encoding="utf-8")
    start = re.search(rf"^//: kernel {name}\(.*\n(?://:.*\n)*", text, re.MULTILINE)
    assert start
    body = text[start.end() :].split("\n//: kernel")[0].rstrip("\n")
    assert words(readable(short.body)) == words(body)
    assert short.body.rstrip("\n").count("\n") == body.count("\n")
    whole = words(with_includes(text[: text.index("//: kernel")], set()))
    for part in declarations(readable(short.header)):
        assert words(part) in whole, part
    assert "//" not in short.header + short.body
    assert len(short.header + short.body) < 0.75 * len(whole + words(body))


@pytest.mark.parametrize(("file", "name"), KERNELS_OF_FILES)
def test_nothing_of_metal_gets_another_name(file: str, name: str) -> None:
    """Strings are pragmas, which only a GPU's compiler reads. The emulator compiles everything else."""
    short = load(file, name)
    strings = set(re.findall(r'"[^"]*"', short.header))
    assert strings <= {'"unroll"', '"unroll 1"'}
    defined = set(re.findall(r"^#if (.*)", short.header, re.MULTILINE))
    assert defined <= {"defined(__METAL_VERSION__)||defined(__CUDACC__)"}


def test_what_a_kernel_does_not_use_is_left_out() -> None:
    keys, values = (readable(load("seal_page/seal_page.metal", f"seal_{what}").header) for what in ("keys", "values"))
    both = readable(load("paged_attention/paged_attention_decode.metal", "paged_attention_decode").header)
    assert "value_at" in both
    assert "append_entry" in both
    assert "load_run" not in keys + values


def test_short_names_are_one_to_one_and_nobody_elses() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.rglob("*.[hm]*") if path.suffix in (".h", ".metal"))
    names = source._short_names()
    assert len(set(names.values())) == len(names)
    assert not [short for short in names.values() if re.search(rf"\b{short}\b", text)]
    assert all(len(short) < len(name) for name, short in names.items())
    folder = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
    before = ("utils.h", "defines.h", "complex.h", "bf16.h", "bf16_math.h", "logging.h")  # what MLX puts before a kernel
    prelude = "".join((folder / name).read_text(encoding="utf-8") for name in before if (folder / name).exists())
    assert "METAL_FUNC" in prelude
    assert not set(re.findall(r"\w+", prelude)) & set(names.values())


def test_messages_have_the_names_of_the_files() -> None:
    short = source._short_names()
    message = (
        f"program_source:12:9: error: use of undeclared identifier '{short['attend_page']}'\n  {short['attend_page']}<D>({short['place']})"
    )
    expected = "program_source:12:9: error: use of undeclared identifier 'attend_page'\n  attend_page<D>(place)"
    assert readable(message) == expected
    trial = KernelTrial("a kernel", lambda: fail(message), failure="failed", listed=False)
    assert "undeclared identifier 'attend_page'" in str(trial.obstacle())
    assert failed_trials()[-1][1] == expected


def fail(message: str) -> None:
    raise RuntimeError(message)


def declarations(header: str) -> list[str]:
    """Return the pieces of a header that end with a brace or a semicolon at its margin."""
    parts, text, depth = [], "", 0
    for line in header.splitlines():
        text += line + "\n"
        depth += line.count("{") - line.count("}")
        if not depth and (line.endswith(("}", ";")) or line.startswith("#")):
            parts.append(text)
            text = ""
    return parts


def with_includes(text: str, seen: set[str]) -> str:
    def insert(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return with_includes((ROOT / match[1]).read_text(encoding="utf-8").replace("#pragma once\n", ""), seen)

    return re.sub(r'^#include "(.+)"\n', insert, text, flags=re.MULTILINE)


def words(code: str) -> str:
    """Return all words and marks of code without comments, each after a space."""
    found = [m.group() for m in TOKENS.finditer(code) if m.lastgroup not in {"space", "comment"}]
    return " ".join(re.sub(r"\s+", "", text) if text.startswith("#") else text for text in found)


def test_an_unknown_kernel_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="seal_keys, seal_values"):
        load("seal_page/seal_page.metal", "seal")
