"""Mamba 2 layers of several families."""

from __future__ import annotations

from ...base_config import Config, Source
from ...transforms import Transform, conv_kernel, decay, flat


def mamba_config(source: Source, heads: str, dim: str, state: str, groups: str, taps: str) -> Config:
    """Sizes of the layers under a family's config keys."""
    hparams = source.hparams
    count, inner = hparams.integer("ssm.time_step_rank"), hparams.integer("ssm.inner_size")
    if inner % count:
        raise hparams.error("ssm.inner_size", f"is {inner}, not a multiple of the {count} heads")
    return {
        heads: count,
        dim: inner // count,
        state: hparams.integer("ssm.state_size"),
        groups: hparams.integer("ssm.group_count", 1),
        taps: hparams.integer("ssm.conv_kernel"),
    }


def mamba_names(name: str) -> dict[str, str]:
    """Names of a layer's tensors under `name`."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


MAMBA_TRANSFORMS: dict[str, Transform] = {
    "ssm_a": flat(decay(grouped=False)),
    "ssm_d": flat(),
    "ssm_norm": flat(),
    "ssm_conv1d.weight": conv_kernel(grouped=False),
}
