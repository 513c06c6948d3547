"""What was asked of a conversion, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ConversionError
from ..loading.formats import check_format, parse_dtype
from ..nn.weights import Format
from .encode.affine import Encoder, check_encoder
from .plan.allocation import Budget
from .plan.preparation import Texts, name_of


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `convert`."""

    form: Format | None
    """Format for matrices; None to keep what is stored."""
    any_group: bool
    """Whether matrices in the bits of `form` keep their own group size."""
    dtype: mx.Dtype | None
    """Dtype of what is not quantized; None for the source's."""
    encoder: Encoder
    """How matrices are rounded."""
    calibration: Texts
    """What the model reads for the encoder."""
    budget: Budget | None
    """A size or a loss instead of bits."""
    shard_bytes: int
    """Bytes of a file at most."""
    max_memory: float | None
    """GB that may be resident; None for the usual."""
    measure: bool | None
    """Whether to compare a lossy result with its source; None if it is quick."""
    settings: dict[str, Any]
    """What the result depends on, as JSON values."""

    @property
    def quantizes(self) -> bool:
        """True if matrices shall be quantized; otherwise they keep their formats where MLX has these."""
        return self.form is not None or self.budget is not None

    @classmethod
    def checked(
        cls,
        *,
        bits: int | None,
        group_size: int | None,
        mode: str,
        dtype: str | mx.Dtype | None,
        encoder: str | None,
        calibration: Texts,
        bpw: float | None,
        target_kl: float | None,
        plan: str | Path | None,
        shard_bytes: int,
        max_memory: float | None,
        measure: bool | None,
    ) -> Options:
        """As given to `convert`. Raises `MLXInferError` for what does not exist or contradicts itself."""
        budget = Budget.asked_for(bpw, target_kl, plan, bits, group_size, mode)
        bits = 4 if budget else bits  # the plan replaces them
        if group_size is not None and bits is None and mode == "affine":
            raise ConversionError("a group size without bits quantizes nothing: give the bits as well")
        form = check_format(bits, group_size, mode) if bits is not None or mode != "affine" else None
        chosen = check_encoder(encoder)
        settings: dict[str, Any] = {"bits": bits, "group_size": group_size, "mode": mode, "dtype": dtype and str(dtype)}
        settings |= {"shard_bytes": shard_bytes, "encoder": chosen, "calibration": name_of(calibration), "budget": budget and budget.key()}
        return cls(
            form=form,
            any_group=group_size is None,
            dtype=None if dtype is None else parse_dtype(dtype),
            encoder=chosen,
            calibration=calibration,
            budget=budget,
            shard_bytes=shard_bytes,
            max_memory=max_memory,
            measure=measure,
            settings=settings,
        )
