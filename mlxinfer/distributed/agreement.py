"""What ranks tell each other before they begin: who they are, what each is to do, and what it has room for."""

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
from ..loading.fingerprint import model_files
from ..loading.memory.plan import MemoryPlan
from ..util.dataclass import dataclass

_ANY = 1 << 40
_SAMPLES, _SAMPLE = 32, 4096
_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who a rank is."""

    rank: int
    """Its place in the hostfile."""
    nodes: str
    """`Nodes.digest` of its hostfile."""
    version: str
    """Version of mlxinfer."""
    mlx: str
    """Version of MLX."""
    device: str
    """What it computes on, and with which of our CPU kernels: "gpu", "cpu, avx2"."""
    model: str
    """`model_digest` of its copy of the model."""
    memory: int
    """Bytes that the model may take there."""

    @classmethod
    def mine(cls, rank: int, nodes: str, model: str, memory: int) -> Hello:
        """This process's."""
        kernels = f", {kernels_cpu.isa_name()}" if kernels_cpu.in_use() else ""
        kind = str(mx.default_device().type).rpartition(".")[2]
        version = mx.__version__  # type: ignore[attr-defined]
        return cls(rank=rank, nodes=nodes, version=__version__, mlx=version, device=kind + kernels, model=model, memory=memory)

    @classmethod
    def of(cls, told: dict[str, Any]) -> Hello:
        """Parse the hello of a rank. Raises `NodesError` where it has another version, which may say other things, and
        `TypeError` for what no rank says."""
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
        """Raises `NodesError` if the other cannot run the same model with this one, as its one line."""
        for what, own, its in (
            ("has another hostfile", self.nodes, other.nodes),
            (f"runs MLX {other.mlx}, and rank 0 {self.mlx}: install the same", self.mlx, other.mlx),
            ("has another model, or another version of it: copy rank 0's", self.model, other.model),
        ):
            if own != its:
                raise NodesError(f"rank {other.rank} {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What rank 0 tells all others to do."""

    memory: list[int]
    """Bytes that each rank may take: what the plan is made from."""
    plan: str
    """Digest of the plan that every rank must come to."""
    split: str
    """"pipeline" or "tensor"."""
    settings: dict[str, Any]
    """Fields of `EngineArgs` that decide how weights are read and how memory is used."""

    adapters: dict[str, str]
    """Digests of the adapters by name, in the order of their places."""
    besides: int
    """Bytes of weights that rank 0 has besides blocks: embedding, output matrix, and what drafts."""
    taps: list[int]
    """Blocks before which a head reads the rows, for models divided by layers."""
    windows: list[int | None]
    """Windows of the attention layers that rank 0 has besides those of the blocks: a head's. Its pages are counted everywhere."""

    def args(self, path: str, memory_gb: float, adapters: Mapping[str, str | Path] | None) -> EngineArgs:
        """As rank 0's, for the model and the adapters at a rank's own paths. Raises `NodesError` where one is
        missing, and for settings that ranks do not share: rank 0 names no files."""
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
    *("ignore_config_keys", "prefix_cache", "speculate"),
)


def shared_settings(args: EngineArgs, dtype: str) -> dict[str, Any]:
    """The settings that all ranks share, with the dtype that rank 0 has chosen."""
    return {name: getattr(args, name) for name in _SHARED} | {"dtype": dtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a rank has room for, with its part of the model."""

    context: int
    """Tokens of a sequence."""
    pool_tokens: int
    """Tokens of all pages."""
    rows: int
    """Rows of a step."""
    scored_rows: int
    """Rows of prompts whose logits are computed in a step."""
    max_num_seqs: int
    """Sequences that run together."""
    prefix_cache_tokens: int
    """Tokens that are kept for reuse."""
    snapshots: int
    """Bytes of open pages and states kept for reuse, as they would be for the whole model."""

    @classmethod
    def of(cls, plan: MemoryPlan, share: float, *, pages: bool) -> Limits:
        """Those of a plan for a part that has this share of the bytes of a snapshot. `pages`: it has layers with pages; a part of
        recurrent layers only sets no limit to them."""
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
    def least(limits: Iterable[dict[str, int]]) -> Limits:
        """What all of them have room for."""
        found = list(limits)
        return Limits(**{name: min(each[name] for each in found) for name in found[0]})

    def told(self) -> dict[str, int]:
        """As JSON."""
        return asdict(self)

    def limited(self, config: EngineConfig) -> EngineConfig:
        """A configuration within them."""
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
    """16 hexadecimal digits that copies of a model have in common: of its config, and of the sizes, headers and samples of its files."""
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


def say(line: str) -> None:
    """A line for the log of this rank."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201
