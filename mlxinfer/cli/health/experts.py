"""Section of `mlxinfer doctor MODEL` about routed experts that stay in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...loading.memory.experts import REPEATED_SHARE, ExpertMemory
from ...loading.memory.hit_rates import repeated_share
from ..common.console import human_bytes

ASSUMED_SPEEDS = (3e9, 5e9, 7e9)
"""Bytes per second of disks for which the rate is computed: a Mac's internal SSD reads about this much, by age and size."""

_ASSUMED = f"assumed: {REPEATED_SHARE:.0%} are in memory because of earlier tokens, the rest is uniform"
_MEASURED = "from the hits of the last process with this model"


def experts_object(memory: ExpertMemory, path: Path) -> dict[str, Any]:
    """Describe pools of experts for a model at `path`, in JSON's types, with the speed of its disk."""
    from ...expert_offload.disk_speed import read_speed  # starts threads

    measured = repeated_share(path)
    hit_rate = memory.hit_rate(REPEATED_SHARE if measured is None else measured)
    largest = max(memory.layers, key=lambda layer: layer.read_bytes)
    return {
        "layers": [{"key": each.key, "experts": each.experts, "slots": each.slots, "record": each.record_bytes} for each in memory.layers],
        "dense": memory.dense,
        "pools": memory.pools,
        "all_experts": memory.all_experts,
        "hit_rate": hit_rate,
        "hit_rate_is_measured": measured is not None,
        "token_bytes": memory.token_bytes(hit_rate),
        "uniform_hit_rate": memory.uniform_hit_rate,
        "uniform_token_bytes": memory.token_bytes(memory.uniform_hit_rate),
        "chosen_bytes": memory.chosen_bytes,
        "disk_bytes_per_s": read_speed(_weights_file(path), largest.read_bytes),
    }


def expert_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Describe an `experts_object` for people."""
    layers = found["layers"]
    slots, experts = sum(each["slots"] for each in layers), sum(each["experts"] for each in layers)
    shape = {(each["slots"], each["experts"]) for each in layers}
    each_layer = "{} of {} in each".format(*shape.pop()) if len(shape) == 1 else f"{slots} of {experts} in all"
    yield (
        f"{human_bytes(found['pools'])} of {human_bytes(found['all_experts'])} of routed experts are in memory: {each_layer} of "
        f"{len(layers)} layers; the disk has the rest"
    )
    yield f"{human_bytes(found['dense'])} of other weights are always in memory"
    yield (
        f"a token needs {human_bytes(found['chosen_bytes'])} of experts and reads {human_bytes(found['token_bytes'])} of them at a hit "
        f"rate of {found['hit_rate']:.0%} ({_MEASURED if found['hit_rate_is_measured'] else _ASSUMED})"
    )
    yield f"with uniform routing it reads {human_bytes(found['uniform_token_bytes'])}, at a hit rate of {found['uniform_hit_rate']:.0%}"
    speed, nbytes = found["disk_bytes_per_s"], found["token_bytes"]
    if not nbytes:
        return
    if speed:
        yield f"this disk reads {human_bytes(speed)}/s (measured), enough for {_rate(speed / nbytes)} tokens/s (computed)"
    others = ", ".join(f"{_rate(each / nbytes)} at {human_bytes(each)}/s" for each in ASSUMED_SPEEDS)
    yield f"{'other disks' if speed else 'disks'} (computed): tokens/s {others}"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _weights_file(path: Path) -> Path:
    """Return the largest file of a model."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    return max(files, key=lambda file: file.stat().st_size, default=path)
