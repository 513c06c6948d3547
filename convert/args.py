"""Settings of a conversion. `ConvertArgs` is the only list: command line options and the table in docs/conversion.md follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import about, settings, settings_table, unknown_keyword
from ..errors import ConversionError
from ..util.dataclass import dataclass

if TYPE_CHECKING:
    import mlx.core as mx

    from ..nn.weights import Format
    from .calibrate.texts import Calibration
    from .encode.affine import Encoder
    from .plan.budget import QuantizationBudget

SHARD_BYTES = 5 << 30

_IGNORED_KEYS = next(one.metadata for one, _ in settings() if one.name == "ignore_config_keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertArgs:
    """Settings of a conversion, each explained in its metadata and in docs/conversion.md. `check` finds contradictions."""

    bits: int | None = field(
        default=None, metadata=about("Bits of a weight: 2, 3, 4, 5, 6 or 8. Without it, and without --mode, nothing is quantized")
    )
    group_size: int | None = field(
        default=None, metadata=about("Weights that share a scale: 32, 64 or 128", automatic="64, or what the mode needs")
    )
    mode: str = field(default="affine", metadata=about("affine, mxfp4, mxfp8 or nvfp4"))
    bpw: float | None = field(
        default=None, metadata=about("Instead of bits: bits per weight of the text model, each matrix in the format that suits it")
    )
    target_kl: float | None = field(
        default=None, metadata=about("Instead of bits: the smallest model expected to differ so much from SRC (KL, in nats)")
    )
    plan: Path | str | None = field(default=None, metadata=about("Instead of bits: a quantization_plan.json, as --bpw writes it"))
    calibration: str | Path | Calibration | None = field(
        default=None,
        metadata=about("What gptq and --bpw read: samples (the model's own), random, or a text file", automatic="samples"),
    )
    encoder: str | None = field(
        default=None,
        metadata=about("How to round: fit (to what each layer computes), gptq (slower, closer) or minmax", automatic="fit"),
    )
    max_memory: float | None = field(
        default=None, metadata=about("Keep less than this in memory at a time, as far as that can be computed", unit="GB")
    )
    measure: bool | None = field(default=None, metadata=about("Compare the result with its source on a text", automatic="if it is quick"))
    adapter: Path | str | None = field(default=None, metadata=about("Merge this LoRA adapter (a folder of PEFT or mlx-lm, or a GGUF file)"))
    ignore_config_keys: Sequence[str] = field(default=(), metadata=_IGNORED_KEYS)
    towers: str = field(
        default="16",
        metadata=about("Vision tower: 16 (as it is stored), 8 (its blocks in 8 bits), or none (the text model alone)"),
    )
    dtype: str | mx.Dtype | None = field(
        default=None, metadata=about("Store what is not quantized as float32, bfloat16 or float16", automatic="as it is")
    )
    shard_bytes: int = field(default=SHARD_BYTES, metadata=about("Largest size of a file", unit="bytes", command="none"))

    @classmethod
    def of(cls, args: ConvertArgs | None, keywords: dict[str, Any]) -> ConvertArgs:
        """Return `args`, or new ones made from keywords. Raises `UnknownKeywordError` and `TypeError` if both are given."""
        names = [one.name for one in fields(cls)]
        for name in keywords:
            if name not in names:
                raise unknown_keyword("convert", name, names)
        if args is not None and keywords:
            raise TypeError("convert takes a ConvertArgs or keywords, not both")
        return args or cls(**keywords)

    def check(self) -> CheckedArgs:
        """Return the settings as the program uses them. Raises `MLXInferError` for unknown names and contradictions."""
        from ..loading.formats import check_format, parse_dtype
        from .encode.affine import check_encoder
        from .plan.budget import QuantizationBudget

        self._check_budget()
        budget = QuantizationBudget.of(self.bpw, self.target_kl, self.plan)
        bits = 4 if budget else self.bits  # the plan replaces them
        if self.group_size is not None and bits is None and self.mode == "affine":
            raise ConversionError("a group size without bits quantizes nothing: give the bits as well")
        form = check_format(bits, self.group_size, self.mode) if bits is not None or self.mode != "affine" else None
        encoder = check_encoder(self.encoder)
        settings: dict[str, Any] = {
            "bits": bits,
            "group_size": self.group_size,
            "mode": self.mode,
            "dtype": self.dtype and str(self.dtype),
            "shard_bytes": self.shard_bytes,
            "encoder": encoder,
            "calibration": None if self.calibration is None else str(getattr(self.calibration, "name", self.calibration)),
            "budget": budget and budget.key(),
        }
        if self.towers not in ("16", "8", "none"):
            raise ConversionError(f"towers must be 16, 8 or none, not {self.towers!r}")
        if self.towers != "16":
            settings["towers"] = self.towers
        if self.ignore_config_keys:
            settings["ignore_config_keys"] = sorted(self.ignore_config_keys)
        return CheckedArgs(self, form, None if self.dtype is None else parse_dtype(self.dtype), encoder, budget, settings)

    def _check_budget(self) -> None:
        """Raise `ConversionError` for a budget out of range, or with another setting that chooses formats."""
        budgets = {"--bpw": self.bpw, "--target-kl": self.target_kl, "--plan": self.plan}
        asked = [name for name, value in budgets.items() if value is not None]
        if not asked:
            return
        formats = {"--bits": self.bits, "--group-size": self.group_size, "--mode": None if self.mode == "affine" else self.mode}
        others = [name for name, value in formats.items() if value is not None]
        if len(asked) > 1 or others:
            raise ConversionError(f"{' and '.join(asked + others)} each say how matrices are quantized: give one of them")
        for name, value in (("--bpw", self.bpw), ("--target-kl", self.target_kl)):
            if value is not None and not 0 < value < 32:
                raise ConversionError(f"{name} {value:g} is no such number: give one like {'4.5' if name == '--bpw' else '0.02'}")


@dataclass(frozen=True, slots=True)
class CheckedArgs:
    """`ConvertArgs` in the types that the program uses."""

    args: ConvertArgs
    """The settings as given."""
    form: Format | None
    """Format for matrices; None to keep what is stored."""
    dtype: mx.Dtype | None
    """Dtype of what is not quantized; None for the source's."""
    encoder: Encoder
    """Method of rounding."""
    budget: QuantizationBudget | None
    """A size or a loss instead of bits."""
    settings: dict[str, Any]
    """Everything given that the result depends on, as JSON values."""

    @property
    def quantizes(self) -> bool:
        """True if matrices are to be quantized; otherwise they keep their formats if MLX has these."""
        return self.form is not None or self.budget is not None


if __name__ == "__main__":
    print(settings_table(ConvertArgs), end="")  # noqa: T201
