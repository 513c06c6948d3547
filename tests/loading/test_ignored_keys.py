"""Keys of a config that the user ignores: reported, and ignored only if nothing reads them."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.engines.tiny_engine import GOLDEN

from mlxinfer import LLM
from mlxinfer.convert import convert
from mlxinfer.errors import MLXInferError, SettingError, UnsupportedModelError
from mlxinfer.loading.find.catalog import describe
from mlxinfer.loading.load import load, open_checkpoint
from mlxinfer.models.config_reader import check_ignored, ignored_note
from tests.support.formats.gguf_golden import rewritten


def changed(folder: Path, name: str = "llama", **keys: Any) -> Path:
    """A golden checkpoint with these keys in its config."""
    copy = folder / name
    shutil.copytree(GOLDEN / name, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8")) | keys
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def test_the_error_names_the_way_on(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"warp_factor.*--ignore-config-key warp_factor.*ignore_config_keys"):
        load(changed(tmp_path, warp_factor=9))


def test_an_ignored_key_is_named_once_and_changes_nothing(tmp_path: Path) -> None:
    path = changed(tmp_path, warp_factor=9)
    with LLM(path, ignore_config_keys=["warp_factor"]) as llm, LLM(GOLDEN / "llama") as plain:
        assert [note for note in llm.notes if "warp_factor" in note] == [note for note in llm.notes if note not in plain.notes]
        assert len([note for note in llm.notes if "warp_factor" in note]) == 1


@pytest.mark.parametrize(
    ("keys", "fault"),
    [("warp_factor", "list"), ([3], "list"), ([""], "list"), (["warp_factor", "warp"], "no key 'warp'"), (["hidden_size"], "hidden_size")],
)
def test_what_cannot_be_ignored_is_an_error(tmp_path: Path, keys: Any, fault: str) -> None:
    with pytest.raises(MLXInferError, match=fault):
        LLM(changed(tmp_path, warp_factor=9), ignore_config_keys=keys)


def test_a_key_that_is_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="rms_norm_eps is read by this model"):
        load(changed(tmp_path), ignore_config_keys=["rms_norm_eps"])


def test_parameters_of_a_rope(tmp_path: Path) -> None:
    path = changed(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "warp": 2})
    with pytest.raises(UnsupportedModelError, match=r"warp.*--ignore-config-key warp"):
        load(path)
    assert any("warp" in note for note in load(path, ignore_config_keys=["warp"]).notes)
    with pytest.raises(UnsupportedModelError, match="rope_theta is read"):
        load(path, ignore_config_keys=["warp", "rope_theta"])


def test_headers_alone(tmp_path: Path) -> None:
    path = changed(tmp_path, warp_factor=9)
    assert any("warp_factor" in note for note in describe(path, ignore_config_keys=["warp_factor"]).notes)
    with pytest.raises(SettingError, match="nonesuch"):
        describe(path, ignore_config_keys=["warp_factor", "nonesuch"])


@pytest.mark.parametrize("encoder", ["fit", "gptq"])
def test_a_conversion_goes_without_the_key_and_says_so(tmp_path: Path, encoder: str) -> None:
    source, out = changed(tmp_path, warp_factor=9), tmp_path / "out"
    report = convert(source, out, bits=8, encoder=encoder, calibration="random", ignore_config_keys=["warp_factor"])
    assert any("warp_factor" in note for note in report.notes)
    assert "warp_factor" in (out / "README.md").read_text(encoding="utf-8")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert "warp_factor" not in config
    assert len([note for note in load(out).notes if "warp_factor" in note]) == 1
    with pytest.raises(UnsupportedModelError, match="warp_factor"):
        load(source)


def test_a_key_of_a_gguf_file(tmp_path: Path) -> None:
    path = rewritten("llama", tmp_path / "x.gguf", {"attention.secret": 1})
    for name in ("attention.secret", "llama.attention.secret"):
        with closing(open_checkpoint(path, ignore_config_keys=[name])) as checkpoint:
            check_ignored([name], checkpoint.config)
            assert ignored_note(checkpoint.config)[0].startswith("keys of the config ignored, as asked: llama.attention.secret;")
