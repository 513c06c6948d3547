"""Replayed KV events give the content of the prefix cache."""

import random

import mlx.core as mx
import pytest
from support.engines.disk_entries import settle
from support.engines.tiny_engine import request, run, tiny_engine, tiny_model

from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_events import DISK, GPU, AllBlocksCleared, BlockRemoved, BlockStored, block_hash, published_ids
from mlxinfer.cache.pages import PAGE
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine


class Replay:
    """A router's view: (medium, group, hash) -> (parent, tokens)."""

    def __init__(self):
        self.blocks = {}
        self.removals = self.clearings = 0

    def __call__(self, event):
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            self.clearings += 1
        elif isinstance(event, BlockStored):
            key = event.medium, event.group, event.block_hash
            assert key not in self.blocks
            assert len(event.token_ids) == PAGE
            self.blocks[key] = event.parent_block_hash, event.token_ids
        elif isinstance(event, BlockRemoved):
            del self.blocks[event.medium, event.group, event.block_hash]
            self.removals += 1

    def of(self, medium):
        return {key[1:]: value for key, value in self.blocks.items() if key[0] == medium}


def truth(index):
    """Return the content of the index in the form of a replica."""
    found = {}
    for node in index.nodes():
        for group, page in enumerate(node.pages):
            if page is not None:
                parent = block_hash(node.parent.digest) if node.depth > 1 else None
                found[group, block_hash(node.digest)] = parent, tuple(memoryview(node.block).cast("q"))
    return found


def prompts(seed, count, longest=150):
    chance = random.Random(seed)
    heads = [[chance.randrange(5, 90) for _ in range(chance.randrange(64, 200))] for _ in range(3)]
    return [chance.choice(heads) + [chance.randrange(5, 90) for _ in range(chance.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_replayed_they_are_the_tree_at_every_moment_with_evictions(name):
    """Gemma's layers with windows are a second group of pages."""
    engine, replay = tiny_engine(name, max_context=512, kv_cache_tokens=1024, max_num_seqs=2), Replay()
    engine.send_kv_events(replay)
    for prompt in prompts(1, 16):
        engine.add(request(prompt, limit=3))
        while not engine.idle:
            engine.step()
            assert replay.of(GPU) == truth(engine.cache.pool.index)
    assert replay.removals > 5
    assert {group for group, _ in replay.of(GPU)} == ({0} if name == "llama" else {0, 1})


def test_who_begins_late_is_told_of_what_is_there():
    engine, replay = tiny_engine(max_context=512), Replay()
    for prompt in prompts(2, 4):
        run(engine, [request(prompt, limit=2)])
    engine.send_kv_events(replay)
    assert replay.of(GPU) == truth(engine.cache.pool.index) != {}
    hashes = {own for _, own in replay.of(GPU)}
    assert all(parent is None or parent in hashes for parent, _ in replay.of(GPU).values())


def test_salted_pages_say_so(monkeypatch):
    engine, found = tiny_engine(max_context=512), []
    for salt in ("", "team"):
        monkeypatch.setattr(engine.kv_cache_manager, "_cache_salt", lambda sequence, salt=salt: salt)
        run(engine, [request(prompts(5, 1)[0], limit=2)])
    engine.send_kv_events(found.append)
    salts = {event.salt for event in found if isinstance(event, BlockStored)}
    assert len(salts) == 2
    assert "" in salts
    assert "team" not in "".join(salts)


def test_a_cache_that_starts_again_says_so():
    engine, replay = tiny_engine(max_context=512), Replay()
    engine.send_kv_events(replay)
    run(engine, [request(prompts(3, 1)[0], limit=2)])
    assert replay.blocks
    engine._cancel_all()  # as after a Ctrl-C
    assert (replay.clearings, replay.blocks) == (2, {})
    run(engine, [request(prompts(3, 1)[0], limit=2)])
    assert replay.of(GPU) == truth(engine.cache.pool.index) != {}


def test_pages_on_disk_have_their_own_medium(tmp_path):
    replay, config = Replay(), EngineConfig(max_context=512, kv_cache_tokens=4096, max_num_batched_tokens=64, max_num_seqs=8)
    engine = Engine(tiny_model(), config, dtype=mx.float32, disk=DiskStorage(tmp_path, 10**9))
    engine.send_kv_events(replay)
    for prompt in prompts(4, 3):
        run(engine, [request(prompt, limit=2)])
    while engine.tidy():
        pass
    assert replay.of(DISK) == replay.of(GPU) == truth(engine.cache.pool.index) != {}
    engine.close(60)


def test_pages_that_the_disk_has_no_room_for_are_told_as_removed(tmp_path):
    replay, config = Replay(), EngineConfig(max_context=512, kv_cache_tokens=4096, max_num_batched_tokens=64, max_num_seqs=8)
    storage = DiskStorage(tmp_path, 400_000)
    engine = Engine(tiny_model(), config, dtype=mx.float32, disk=storage)
    engine.send_kv_events(replay)
    for prompt in prompts(6, 8):
        run(engine, [request(prompt, limit=2)])
        settle(storage)  # a page is written once its folder is listed
        while engine.tidy():
            pass
    engine.close(60)
    files = {path.name[:16] for path in tmp_path.rglob("*full*")}
    assert {f"{own:016x}" for _, own in replay.of(DISK)} == files != set()
    assert replay.removals > 0


def test_image_rows_are_published_as_ids_of_31_bits():
    keys = [5, (1 << 62) + 6, (1 << 63) - 1]
    assert published_ids(keys) == (5, 6, 2**31 - 1)
