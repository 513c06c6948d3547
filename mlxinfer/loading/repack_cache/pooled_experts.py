"""Routed experts that stay in a file besides those in pools: the file is written once, one layer at a time, and read in place of the
checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ... import kernels_cpu
from ...expert_offload import ExpertFileWriter, ExpertStore, experts_path
from ...models import build_blocks
from ...models.block import Block
from ...models.decoder import BlockStack
from ...models.expert_records import AnyExperts, RoutedTensors, products_of, record_of, routed_experts, use_pool
from ...models.pipeline_stage import Stage
from ...nn.moe import FollowingLayer, MixtureOfExperts
from ...nn.packing import settle
from ...nn.weights import Dense, Format
from ...util.device import clear_cache, is_gpu
from ...util.plain_file import file_stamp
from ..checkpoint import Checkpoint
from ..find.fingerprint import model_files
from ..memory.experts import ExpertLayer
from ..weights import CheckpointWeights

WeightsOf = Callable[[Callable[[str], bool]], CheckpointWeights]
"""Makes weights that read the names for which the function is True."""


class PooledExperts:
    """Pools of a model's routed experts."""

    def __init__(self, store: ExpertStore, dtype: mx.Dtype) -> None:
        """`dtype` is that of the activations."""
        self.store = store
        self._dtype = dtype
        self._model: BlockStack | None = None
        self._wanted: Callable[[], int] | None = None

    def reads(self, name: str) -> bool:
        """True for tensors in the graph that the checkpoint supplies."""
        return name not in RoutedTensors(self.store.pools)

    def settle(self, part: object, **options: Any) -> None:
        """Use the pools in a part of the model, then settle it as `nn.packing.settle` does."""
        self._attach(part)
        settle(part, **options)

    def belong_to(self, model: BlockStack) -> None:
        """Let the layers of the model whose parts were settled read experts ahead."""
        self._model = model
        self._follow(model)

    def counts(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` about experts, since the model was loaded; {} if all experts are resident."""
        if self.store.is_complete:
            return {}
        stats = self.store.stats()
        return {
            "expert_bytes_read": stats.bytes_read,
            "expert_hits": stats.hits,
            "expert_misses": stats.misses,
            "expert_wait_s": stats.waiting_s,
            "experts": stats.experts,
            "expert_slots": stats.slots,
        }

    def check(self, *, waits: bool) -> None:
        """Raise the error of a step that ended. With `waits`, wait for all submitted steps first.

        Raises `ExpertReadError` if experts could not be read. The step then computed garbage.
        """
        if waits and not self.store.is_complete:
            mx.synchronize()
        if (fault := self.store.take_fault()) is not None:
            raise fault

    def forget_fault(self) -> None:
        """Wait for all submitted steps, which may fail like the one before, and forget their error."""
        mx.synchronize()
        self.store.take_fault()

    def resize_to(self, nbytes: int) -> None:
        """Ask the engine to let all pools together take `nbytes`, between two steps. Any thread may ask; the last number counts."""
        self.resize_by(lambda: nbytes)

    def resize_by(self, decide: Callable[[], int]) -> None:
        """As `resize_to`, with the bytes that `decide` returns when no step runs. It may then call functions of MLX's allocator, which
        would wait for a running step."""
        self._wanted = decide

    @property
    def must_resize(self) -> bool:
        return self._wanted is not None

    def resize(self) -> None:
        """Let the pools take the bytes that were asked for. No step may run. Raises `ExpertReadError`."""
        decide, self._wanted = self._wanted, None
        if decide is None:
            return
        mx.synchronize()
        wanted = decide()
        if (model := self._model) is None:
            self.store.resize(wanted)
            return
        self._detach(model)
        try:
            self.store.resize(wanted)
        finally:
            self._attach(model.blocks)
            self._follow(model)
            model.rebuild_runs()

    def _detach(self, model: BlockStack) -> None:
        """Drop the arrays of the pools from a model. Otherwise those of all layers exist besides the new ones while pools are resized."""
        model.drop_runs()
        for key, layer in routed_experts(model.blocks):
            if key in self.store.pools:
                _drop(layer)
                layer.ways.clear()

    def _follow(self, model: BlockStack) -> None:
        """Connect each layer with the next one on a GPU. Threads that read ahead slow down a processor that computes by more than they
        save."""
        for block, following in pairwise(model.blocks if is_gpu() else ()):
            if isinstance(block, Block) and isinstance(block.mlp, MixtureOfExperts):
                block.mlp.experts.slots.following = _following(block, following)

    def close(self) -> None:
        """Close the file, and drop the pools and the model. Counts stay."""
        self.store.close()
        self._model = None

    def _attach(self, part: object) -> None:
        for key, layer in routed_experts(part):
            if key in self.store.pools:
                use_pool(layer, self.store.pools[key], self.store)


def _following(block: Block, following: object) -> FollowingLayer | None:
    """Return the next block's layer of experts, if it has a pool that is not complete."""
    if not isinstance(following, Block) or not isinstance(following.mlp, MixtureOfExperts):
        return None
    before, norm, mixture = block.norms.before_mlp, following.norms.before_mlp, following.mlp
    pool = mixture.experts.slots.pool
    if before is None or norm is None or pool is None:
        return None
    return FollowingLayer.of(before, norm, mixture.router, mixture.route, pool)


def open_experts(
    checkpoint: Checkpoint,
    layers: Collection[ExpertLayer],
    blocks: int,
    nbytes: int,
    weights: WeightsOf,
    part: Stage | None,
    *,
    dtype: mx.Dtype,
    quantize: Format | None,
) -> PooledExperts:
    """Open the file of a model's routed experts, and make pools of `nbytes` together. The file is written first if there is none.

    The model has `blocks` blocks, of which `part` are those with `layers`, None for all. `weights` makes the weights to read them from.
    Raises `MLXInferError`s.
    """
    model, stage = checkpoint.path, part or Stage(0, blocks)
    path = experts_path(model if part is None else model.with_name(f"{model.stem}-{part.first}-{part.last}"))
    source = _source(checkpoint, stage, dtype, quantize)
    size = sum(layer.experts * layer.read_bytes for layer in layers)
    with ExpertFileWriter(path, source, size) as writer:
        missing = [layer.key for layer in layers if layer.key not in writer.keys]
        if missing:
            tensors = RoutedTensors(missing)
            read = weights(lambda name: name in tensors)
            build_blocks(checkpoint.config, read, stage, partial(_write_experts, writer, read, frozenset(missing)), dtype)
            read.finish()
        return PooledExperts(ExpertStore(writer.finish(), nbytes), dtype)


def _source(checkpoint: Checkpoint, part: Stage, dtype: mx.Dtype, quantize: Format | None) -> Mapping[str, Any]:
    return {
        "files": [file_stamp(each) for each in model_files(checkpoint.path)],
        "blocks": [part.first, part.last],
        "packed": [kernels_cpu.in_use(), kernels_cpu.packed_version()],
        "device": str(mx.default_device()),
        "dtype": str(dtype),
        "quantize": None if quantize is None else [quantize.bits, quantize.group_size, quantize.mode],
    }


def _write_experts(writer: ExpertFileWriter, weights: CheckpointWeights, keys: Collection[str], part: object) -> None:
    """Write the experts of a part of the model to the file, and drop them. Raises `WeightsError` for those that no file may have."""
    for key, layer in routed_experts(part):
        if key in keys:
            settle(layer, dtype=weights.dtype)
            weights.index.check()
            writer.add(key, *record_of(layer))
            _drop(layer)
            clear_cache()


def _drop(layer: AnyExperts) -> None:
    for linear in products_of(layer):
        linear.matrix, linear.bias = Dense(mx.zeros((0, 0, 0))), None
