"""A model's fingerprint changes with any of its files."""

import os

import pytest

from mlxinfer.loading.find.fingerprint import fingerprint


@pytest.fixture
def model(tmp_path):
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_it_stays_while_nothing_changes(model):
    known = fingerprint(model)
    assert fingerprint(model) == known
    (model / "README.md").write_text("more")
    assert fingerprint(model) == known


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_it_changes_with_a_file_even_of_the_same_size_and_time(model, name):
    known, path = fingerprint(model), model / name
    before = path.stat()
    path.write_text("[]")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fingerprint(model) != known


def test_it_changes_with_what_it_is_loaded_with(model, tmp_path):
    assert len({fingerprint(model, *settings) for settings in ((), (4,), (8,), (4, 64))}) == 4
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    assert fingerprint(tmp_path / "one.gguf") == fingerprint(tmp_path / "one.gguf")
    assert fingerprint(tmp_path / "one.gguf") != fingerprint(tmp_path / "two.gguf")


def test_what_is_gone_is_never_found_again(model):
    assert fingerprint(model / "gone.gguf") != fingerprint(model / "gone.gguf")
