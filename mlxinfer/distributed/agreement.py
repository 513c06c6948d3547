"""Messages that the ranks exchange before the group starts: their identity, rank 0's orders, and each rank's limits."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import kernels_cpu
from .._version import __version__
from ..config import EngineArgs, EngineConfig
from ..errors import NodesError
from ..loading.find.fingerprint import model_files
from ..loading.memory.plan import MemoryPlan
from ..util.dataclass import dataclass

_ANY = 1 << 40
_SAMPLES, _SAMPLE = 32, 4096
_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Identity of a rank, sent to rank 0 first."""

    rank: int
    """Position in the hostfile."""
    nodes: str
    """`Nodes.digest` of the rank's hostfile."""
    version: str
    mlx: str
    device: str
    """Device, with the instruction set of the CPU kernels in use: "gpu", "cpu, avx2"."""
    model: str
    """`model_digest` of the rank's copy of the model."""
    memory: int
    """Bytes that the model may take on the rank."""

    @classmethod
    def mine(cls, rank: int, nodes: str, model: str, memory: int) -> Hello:
        """Return the identity of this process."""
        kernels = f", {kernels_cpu.isa_name()}" if kernels_cpu.in_use() else ""
        kind = str(mx.default_device().type).rpartition(".")[2]
        version = mx.__version__  # type: ignore[attr-defined]
        return cls(rank=rank, nodes=nodes, version=__version__, mlx=version, device=kind + kernels, model=model, memory=memory)

    @classmethod
    def of(cls, told: dict[str, Any]) -> Hello:
        """Parse the hello of a rank.

        Raises `NodesError` for another version of mlxinfer, whose fields may differ, and `TypeError` for malformed fields.
        """
        version = told.get("version")
        if version != __version__:
            raise NodesError(f"rank {told.get('rank')!r:.20} runs mlxinfer {version!s:.20}, and rank 0 {__version__}: install the same")
        hello = cls(**told)
        for name in cls.__dataclass_fields__:
            kind = int if name in ("rank", "memory") else str
            if type(getattr(hello, name)) is not kind:
                raise TypeError(f"{name} is not of type {kind.__name__}")
        return hello

    def check(self, other: Hello) -> None:
        """Raise `NodesError` if `other` cannot run the same model with this rank."""
        for what, own, its in (
            ("has another hostfile", self.nodes, other.nodes),
            (f"runs MLX {other.mlx}, and rank 0 {self.mlx}: install the same", self.mlx, other.mlx),
            ("has another model, or another version of it: copy rank 0's", self.model, other.model),
        ):
            if own != its:
                raise NodesError(f"rank {other.rank} {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Orders of rank 0 to all other ranks."""

    memory: list[int]
    """Bytes that each rank may take; input of the plan."""
    plan: str
    """Digest of the plan that every rank must compute."""
    split: str
    """"pipeline" or "tensor"."""
    settings: dict[str, Any]
    """Fields of `EngineArgs` that decide how weights are read and how memory is used."""

    adapters: dict[str, str]
    """Digests of the adapters by name, in the order of their slots."""
    outside_blocks: int
    """Bytes of rank 0's weights outside the blocks: embedding, output matrix, and drafter."""
    taps: list[int]
    """Blocks before which a draft head reads the rows; for pipelines only."""
    windows: list[int | None]
    """Windows of the draft head's attention layers on rank 0. Every rank counts their pages."""

    def args(self, path: str, memory_gb: float, adapters: Mapping[str, str | Path] | None) -> EngineArgs:
        """Return rank 0's settings with the model and adapters at this rank's paths.

        Raises `NodesError` for a missing adapter, and for settings that ranks do not share, as rank 0 must not name files.
        """
        odd = [name for name in self.settings if name not in _SHARED]
        if odd:
            raise NodesError(f"rank 0 sets {odd[0]!r:.40}, which each rank sets for itself: install the same version of mlxinfer")
        missing = [name for name in self.adapters if name not in (adapters or {})]
        if missing:
            raise NodesError(f"the adapter {missing[0]} is missing on this rank: give all ranks the same --adapter options")
        own = {name: (adapters or {})[name] for name in self.adapters} or None
        return EngineArgs(path, memory_gb=memory_gb, adapters=own, **self.settings)


_SHARED = (
    *("dtype", "kv", "kv_first16", "bits", "group_size", "gguf_exact", "max_context", "max_num_seqs", "deterministic"),
    *("ignore_config_keys", "prefix_cache", "speculate", "experts_memory"),
)


def shared_settings(args: EngineArgs, dtype: str) -> dict[str, Any]:
    """Return the settings that all ranks share, with the dtype that rank 0 chose."""
    return {name: getattr(args, name) for name in _SHARED} | {"dtype": dtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """Engine limits that fit a rank's memory, for its part of the model."""

    context: int
    """Tokens per sequence."""
    pool_tokens: int
    rows: int
    """Rows per step."""
    scored_rows: int
    """Prompt rows per step whose logits are computed."""
    max_num_seqs: int
    prefix_cache_tokens: int
    snapshots: int
    """Bytes of open pages and states kept for reuse, scaled to the whole model."""

    @classmethod
    def of(cls, plan: MemoryPlan, share: float, *, pages: bool) -> RankLimits:
        """Return the limits of `plan`, for a part with `share` of a snapshot's bytes. `pages` is False if all of its layers are
        recurrent."""
        return cls(
            context=plan.context,
            pool_tokens=plan.pool_tokens if pages else _ANY,
            rows=plan.rows,
            scored_rows=plan.scored_rows,
            max_num_seqs=plan.max_num_seqs,
            prefix_cache_tokens=plan.prefix_cache_tokens if pages else _ANY,
            snapshots=min(int(plan.snapshots / max(share, 1e-3)), _ANY),
        )

    @staticmethod
    def minimum(limits: Iterable[dict[str, int]]) -> RankLimits:
        """Return the smallest of each limit."""
        found = list(limits)
        return RankLimits(**{name: min(each[name] for each in found) for name in found[0]})

    def as_json(self) -> dict[str, int]:
        return asdict(self)

    def limited(self, config: EngineConfig) -> EngineConfig:
        """Return `config` with these limits."""
        return replace(
            config,
            max_context=self.context,
            kv_cache_tokens=self.pool_tokens,
            max_num_batched_tokens=self.rows,
            max_scored_rows=self.scored_rows,
            max_num_seqs=self.max_num_seqs,
            prefix_cache_tokens=self.prefix_cache_tokens,
            snapshot_bytes=self.snapshots,
        )


def model_digest(path: Path) -> str:
    """Return 16 hexadecimal digits over the config and over sizes, headers and samples of the weight files. Copies of a model have the
    same."""
    found = hashlib.sha256()
    for file in model_files(path):
        if file == path or file.suffix in _WEIGHTS:  # a GGUF file may have another name
            size = file.stat().st_size
            found.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for at in _sampled(size):
                    opened.seek(at)
                    found.update(opened.read(_SAMPLE))
        elif file.name == "config.json":
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _sampled(size: int) -> Sequence[int]:
    return sorted({0, max(size - _SAMPLE, 0), *(size * i // _SAMPLES for i in range(_SAMPLES))})


def log_line(line: str) -> None:
    """Write a line to this rank's log."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201
