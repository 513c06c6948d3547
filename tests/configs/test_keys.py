"""Every key that transformers' classes of a family have, now or in an older release, is read, accepted, or refused for a reason.

`keys.json` is the table: by `model_type` and key, what becomes of it. `python -m tests.configs.test_keys` prints the table for the keys in
it and those of the transformers that is installed.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.engines.tiny_engine import GOLDEN

from mlxinfer.models import FAMILIES, architecture, supports
from mlxinfer.models.config_keys import harmless
from mlxinfer.models.config_reader import ConfigReader
from mlxinfer.models.families.hybrid.kimi_linear import PUBLISHED_KEYS
from tests.configs.published import published

TABLE = Path(__file__).parent / "keys.json"


def known() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@cache
def taken() -> dict[str, dict[str, str]]:
    """Return "read" or the accepted values of each key that a family's graph takes, found by reading configs."""
    found: dict[str, dict[str, str]] = {name: {} for name in FAMILIES}
    only, finish = ConfigReader.only, ConfigReader.finish

    def listed(reader: ConfigReader, key: str, *allowed: Any) -> None:
        accepted = "only " + " or ".join(map(json.dumps, allowed))
        found.get(reader.values.get("model_type", ""), {}).setdefault(key, accepted)
        only(reader, key, *allowed)

    def ended(reader: ConfigReader) -> None:
        for key in reader._taken:
            found.get(reader.values.get("model_type", ""), {}).setdefault(key, "read")
        finish(reader)

    golden = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob("*/config.json"))]
    silent = [{"model_type": name} for name in FAMILIES]
    with mock.patch.object(ConfigReader, "only", listed), mock.patch.object(ConfigReader, "finish", ended):
        for config in [*silent, *golden, *published().values()]:
            if supports(config["model_type"]):
                architecture(config)
    return found


def becomes(family: str, key: str) -> str:
    """Return the table's entry for a key."""
    key = PUBLISHED_KEYS.get(key, key) if family == "kimi_linear" else key
    if key in taken()[family]:
        return "only where it says what the graph does" if taken()[family][key].startswith("only ") else "read"
    reason = harmless(key, "a value without a meaning")
    if reason:
        return f"accepted: {reason}"
    stated = [value for value in (False, True, 0, 1, []) if harmless(key, value)]
    return f"accepted as {json.dumps(stated[0])}" if stated else "refused"


def installed(family: str) -> list[str]:
    """The keys of transformers' class, without those of every config."""
    from transformers import AutoConfig, PreTrainedConfig

    config = AutoConfig.for_model(family)
    return sorted(set(config.to_dict()) - set(PreTrainedConfig().to_dict()) - {"model_type"})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_what_becomes_of_each_key(family: str) -> None:
    assert {key: becomes(family, key) for key in known()[family]} == known()[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_refused_that_transformers_writes(family: str) -> None:
    assert not [key for key, fate in known()[family].items() if fate == "refused"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_every_key_of_the_installed_transformers(family: str) -> None:
    assert not set(installed(family)) - set(known()[family])


if __name__ == "__main__":
    table = {family: {key: becomes(family, key) for key in sorted({*known().get(family, {}), *installed(family)})} for family in FAMILIES}
    sys.stdout.write(json.dumps(table, indent=1, sort_keys=True) + "\n")
