from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.convert.write.journal import Journal, Span, digest_of
from mlxinfer.errors import DestinationError

KEY = {"options": {"bits": 4, "mode": "affine"}, "files": {"a": [1, 2], "b": [3]}, "version": "1"}


def reopened(folder: Path, key: dict[str, object] | None = None) -> Journal:
    return Journal(folder, KEY if key is None else key)


def test_units_and_their_values_come_back(tmp_path: Path) -> None:
    journal = reopened(tmp_path)
    assert not journal.resumed
    assert journal.done("a") is None
    journal.record("a", {"error": 0.1 + 0.2, "list": (1, 2)})
    assert journal.done("a") == {"error": 0.30000000000000004, "list": [1, 2]}
    journal.close()
    again = reopened(tmp_path)
    assert again.resumed
    assert again.count == 1
    assert again.done("a") == {"error": 0.30000000000000004, "list": [1, 2]}
    assert again.done("b") is None


def test_every_cut_of_the_file_keeps_the_lines_before_it(tmp_path: Path) -> None:
    journal = reopened(tmp_path)
    ends = []
    for unit in "abc":
        journal.record(unit, {"name": unit})
        ends.append((tmp_path / "journal").stat().st_size)
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    for cut in range(len(whole), -1, -7):
        (tmp_path / "journal").write_bytes(whole[:cut])
        journal = reopened(tmp_path)
        assert [unit for unit in "abc" if journal.done(unit)] == [unit for unit, end in zip("abc", ends, strict=True) if end <= cut]
        journal.record("later")
        journal.close()
        journal = reopened(tmp_path)
        assert journal.done("later") == {}
        journal.close()


def test_a_line_that_was_changed_ends_what_is_known(tmp_path: Path) -> None:
    journal = reopened(tmp_path)
    for unit in ("first", "second", "third"):
        journal.record(unit)
    journal.close()
    text = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(text.replace(b"second", b"sec0nd"))
    journal = reopened(tmp_path)
    assert [journal.done(unit) for unit in ("first", "second", "third")] == [{}, None, None]


@pytest.mark.parametrize("damage", ["byte", "shorter", "absent"])
def test_bytes_that_were_lost_are_noticed(tmp_path: Path, damage: str) -> None:
    data = bytes(range(200))
    path = tmp_path / "weights"
    path.write_bytes(data)
    journal = reopened(tmp_path)
    journal.record("head", {}, [Span("weights", 0, 100, digest_of(path, 0, 100))])
    journal.record("tail", {}, [Span("weights", 100, 200, digest_of(path, 100, 200))])
    journal.close()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(data[:150] if damage == "shorter" else data[:150] + b"?" + data[151:])
    journal = reopened(tmp_path)
    assert (journal.done("head") is None) == (damage == "absent")
    assert journal.done("tail") is None


@pytest.mark.parametrize(("change", "said"), [
    ({"options": {"bits": 3, "mode": "affine"}}, "bits was 4 and is 3"),
    ({"files": {"a": [1, 2], "b": [4]}}, "b has changed"),
    ({"files": {"a": [1, 2]}}, "b has changed"),
    ({"version": "2"}, "version was 1 and is 2"),
])  # fmt: skip
def test_another_key_begins_again_and_says_why(tmp_path: Path, change: dict[str, object], said: str) -> None:
    journal = reopened(tmp_path)
    journal.record("a")
    journal.close()
    other = reopened(tmp_path, KEY | change)
    assert other.changed == said
    assert not other.resumed
    assert other.done("a") is None
    other.close()
    assert not reopened(tmp_path).resumed


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32])
def test_arrays_come_back_bit_for_bit_until_they_are_forgotten(tmp_path: Path, dtype: mx.Dtype) -> None:
    x = (mx.random.normal((3, 5)) * 100).astype(dtype)
    journal = reopened(tmp_path)
    journal.save("states 1", {"x": x}, {"block": 1})
    journal.save("states 2", {})
    journal.close()
    journal = reopened(tmp_path)
    found = journal.load("states 1")
    assert found is not None
    assert found[0]["x"].dtype == dtype
    assert mx.array_equal(found[0]["x"], x).item()
    assert found[1] == {"block": 1}
    assert journal.load("states 2") == ({}, {})
    journal.forget("states 1")
    assert journal.load("states 1") is None
    journal.close()
    assert reopened(tmp_path).load("states 1") is None


def test_one_process_at_a_time(tmp_path: Path) -> None:
    journal = reopened(tmp_path)
    with pytest.raises(DestinationError, match="another conversion"):
        reopened(tmp_path)
    journal.close()
    reopened(tmp_path).close()
