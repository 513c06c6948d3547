"""Pages found on disk after a restart give the logits of a full computation, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest
from support.engines.disk_cache import TOKENS, Reader, files
from support.engines.tiny_engine import tiny_model

from mlxinfer.cache.kv_format import KVFormat

FULL, SLIDING, MOE, HYBRID = "llama", "gemma3_text", "qwen3_moe", "qwen3_next"
FORMATS = [KVFormat(), KVFormat(4, 4), KVFormat(4, 4, first16=True)]
LENGTH, KEPT = 300, (128, 192, 230)


def filled(directory, name, kv, length=LENGTH, **settings):
    """The logits of a prompt, whose pages and some snapshots lie on disk afterwards."""
    with Reader(name, directory, kv, **settings) as reader:
        slot, rows, done = reader.open(), [], 0
        for end in (*KEPT, length):
            rows += reader.read([(slot, TOKENS[done:end])])
            reader.cache.keep(slot, TOKENS[:end])
            done = end
        reader.cache.release(slot)
    return np.concatenate(rows)


def resumed(reader, tokens):
    """Return the number of reused tokens and the logits of the others."""
    reader.prefetch(tokens)
    slot = reader.open(tokens)
    there = reader.past[slot]
    return there, reader.read([(slot, tokens[there:])])[0]


@pytest.mark.long
@pytest.mark.parametrize("kv", FORMATS, ids=lambda kv: f"{kv.name}{' first16' * kv.first16}")
@pytest.mark.parametrize("name", [FULL, SLIDING, MOE, HYBRID])
def test_a_restart(name, kv, tmp_path):
    expected = filled(tmp_path, name, kv)
    with Reader(name, tmp_path, kv) as reader:
        there, logits = resumed(reader, TOKENS[:LENGTH])
        # At least one token has to be computed. A state counts for all of its tokens only.
        assert there == (230 if name == HYBRID else 299)
        assert np.array_equal(logits, expected[there:])
    with Reader(name, tmp_path, kv) as reader:
        there, logits = resumed(reader, [*TOKENS[:231], 5, 6])
        assert there == 230
        assert np.array_equal(logits[0], expected[230])
    with Reader(name, tmp_path, kv) as reader:
        there, logits = resumed(reader, [*TOKENS[:200], *TOKENS[:30]])
        assert there == 192
        assert np.array_equal(logits[:8], expected[192:200])


@pytest.mark.parametrize("name", [FULL, SLIDING, HYBRID])
def test_a_conversation_goes_on_after_restarts(name, tmp_path):
    whole = Reader(name, None, KVFormat(4, 4))
    slot = whole.open()
    done = 0
    for turn in (70, 128, 200, 263, 264, 400):
        expected = whole.read([(slot, TOKENS[done:turn])])[0]
        with Reader(name, tmp_path, KVFormat(4, 4)) as reader:
            there, logits = resumed(reader, TOKENS[:turn])
            assert there == done
            assert np.array_equal(logits, expected)
            (new,) = reader.past
            reader.cache.keep(new, TOKENS[:turn])
            reader.cache.release(new)
        done = turn


@pytest.mark.long
@pytest.mark.parametrize("name", [FULL, SLIDING, HYBRID])
@pytest.mark.parametrize("bad", range(0, 12, 2))
def test_a_broken_file_costs_time_only(name, tmp_path, bad):
    expected = filled(tmp_path, name, KVFormat())
    paths = files(tmp_path)
    path = paths[bad % len(paths)]
    path.write_bytes(path.read_bytes()[:-3] + b"???")
    with Reader(name, tmp_path, KVFormat()) as reader:
        there, logits = resumed(reader, TOKENS[:LENGTH])
        assert np.array_equal(logits, expected[there:])
        for slot in list(reader.past):
            reader.cache.keep(slot, TOKENS[:LENGTH])
            reader.cache.release(slot)
    with Reader(name, tmp_path, KVFormat()) as reader:
        assert np.array_equal(resumed(reader, TOKENS[:LENGTH])[1][-1], expected[-1])


OTHERS = [
    {"name": MOE},
    {"kv": KVFormat(8, 8)},
    {"kv": KVFormat(4, 4, first16=True)},
    {"fingerprint": "new revision"},
    {"dtype": mx.bfloat16},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_nothing_of_another_model_or_format_is_read(tmp_path, other):
    filled(tmp_path, FULL, KVFormat(4, 4))
    before = [path.read_bytes() for path in files(tmp_path)]
    with Reader(**({"name": FULL, "directory": tmp_path, "kv": KVFormat(4, 4)} | other)) as reader:
        reader.prefetch(TOKENS[:LENGTH])
        assert not reader.read_names
        assert reader.cache.find(TOKENS[:LENGTH]).reused == 0
    assert [path.read_bytes() for path in files(tmp_path)] == before


def test_an_adapter_has_pages_of_its_own(tmp_path):
    filled(tmp_path, FULL, KVFormat())
    with Reader(FULL, tmp_path, KVFormat()) as reader:
        reader.prefetch(TOKENS[:LENGTH], "poet")
        assert reader.cache.find(TOKENS[:LENGTH], "poet").reused == 0


def test_a_later_version_of_the_file_format(tmp_path, monkeypatch):
    filled(tmp_path, FULL, KVFormat())
    monkeypatch.setattr("mlxinfer.cache.disk.pagefile.VERSION", "mlxinfer prefix page 2")
    with Reader(FULL, tmp_path, KVFormat()) as reader:
        assert resumed(reader, TOKENS[:LENGTH])[0] == 0


def test_only_the_window_is_read(tmp_path):
    filled(tmp_path, SLIDING, KVFormat(), length=600)
    model = tiny_model(SLIDING)
    windows = {spec.window for spec in model.layers} - {None}
    assert windows
    with Reader(SLIDING, tmp_path, KVFormat()) as reader:
        there, _ = resumed(reader, TOKENS[:600])
        assert there == 599
        read = reader.read_names
    for window in windows:
        assert sum(f"-window{window}." in name for name in read) <= -(-window // 64) + 1
    assert sum("-full." in name for name in read) == 9


def test_little_memory_reads_what_fits(tmp_path):
    filled(tmp_path, FULL, KVFormat(), length=600)
    with Reader(FULL, tmp_path, KVFormat(), kv_cache_tokens=320) as reader:
        reader.prefetch(TOKENS[:600])
        assert 256 <= reader.cache.find(TOKENS[:600]).reused <= 320
    with Reader(FULL, tmp_path, KVFormat(), prefix_cache_tokens=0) as reader:
        reader.prefetch(TOKENS[:600])
        assert not reader.read_names


def test_the_cap_is_smaller_than_the_prompt(tmp_path):
    """The beginning of the prompt is stored, and not rewritten with each prompt."""
    with Reader(FULL, tmp_path, KVFormat(), limit=30 * 18000) as reader:
        slot = reader.open()
        for start in range(0, 3200, 640):
            reader.read([(slot, TOKENS[start : start + 640])])
            reader.flush()
        reader.cache.release(slot)
        assert reader.writes <= 2 * 50
    assert 10 < len(files(tmp_path)) <= 30
    with Reader(FULL, tmp_path, KVFormat(), limit=30 * 18000) as reader:
        assert resumed(reader, TOKENS[:3200])[0] == 64 * len(files(tmp_path))


def test_a_disk_that_fails_is_not_noticed(tmp_path, monkeypatch):
    expected = filled(None, FULL, KVFormat())
    monkeypatch.setattr("mlxinfer.cache.disk.page_dir._SPARE", 1 << 60)
    assert np.array_equal(filled(tmp_path, FULL, KVFormat()), expected)
    assert not files(tmp_path)


def test_what_is_asked_for_twice_is_read_once(tmp_path):
    filled(tmp_path, FULL, KVFormat())
    with Reader(FULL, tmp_path, KVFormat()) as reader:
        assert reader.prefetch(TOKENS[:LENGTH]) > 0
        count = len(reader.read_names)
        assert not reader.cache.prefetch(TOKENS[:LENGTH])
        assert resumed(reader, TOKENS[:LENGTH])[0] == 299
        assert not reader.cache.prefetch(TOKENS[:LENGTH])
        assert len(reader.read_names) == count


def test_beside_running_sequences_little_of_the_time_is_spent(tmp_path):
    with Reader(FULL, tmp_path, KVFormat()) as reader:
        slot = reader.open()
        reader.read([(slot, TOKENS[:640])])
        reader.cache._write_back._rest_until = float("inf")
        assert reader.cache.tidy(idle=False)
        assert not reader.writes
        reader.flush()
        assert reader.writes == 10
