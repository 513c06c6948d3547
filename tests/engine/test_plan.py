"""How much context fits in a device's memory."""

import mlx.core as mx
from support.tiny_directory import tiny_directory

from mlxinfer.cache.format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.device import DeviceMemory
from mlxinfer.engine import plan
from mlxinfer.loading.load import load


def test_fewer_bits_make_room_for_more_tokens(tmp_path, monkeypatch):
    loaded = load(tiny_directory(tmp_path, context=1 << 20), dtype="bfloat16")
    layers = loaded.model.layers
    room = 20_000 * PagedCache.token_bytes(layers, mx.bfloat16)
    own = 16 * PagedCache.sequence_bytes(layers, mx.bfloat16)
    total = loaded.weight_bytes + plan._SPARE + own + int(room)
    monkeypatch.setattr(plan, "device_memory", lambda: DeviceMemory(total, total))
    sizes = {kv: plan.plan_engine(loaded, kv=KVFormat.parse(kv)).capacity_tokens for kv in ("16", "8", "k8v4", "4")}
    for kv, size in sizes.items():
        assert abs(size - room / PagedCache.token_bytes(layers, mx.bfloat16, KVFormat.parse(kv))) <= 1
    assert sizes["16"] < sizes["8"] < sizes["k8v4"] < sizes["4"]
    assert plan.plan_engine(loaded, kv=KVFormat(4, 4, first16=True)).capacity_tokens < sizes["4"]
