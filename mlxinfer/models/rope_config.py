"""Reads and checks rope parameters of either config style: `rope_parameters`, or `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from ..nn.mrope import MRope, chunked_axes, interleaved_axes
from ..nn.rope import ROPE_TYPES, Rope, make_rope
from ..util.dataclass import dataclass
from ..util.typed_reader import is_number
from .config_reader import ConfigReader, way_on

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"})
_OWN: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "proportional": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "ntk_alpha": frozenset({"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor", "attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "ntk_alpha": ("alpha",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_UNDERSTOOD = _COMMON.union(*_OWN.values())
_POSITIVE = _UNDERSTOOD - {"rope_type", "type", "truncate", "short_factor", "long_factor"}
_OPTIONAL_SCALES = frozenset({"mscale", "mscale_all_dim"})
"""Scales of YaRN for which 0 means unset."""
_MROPE = frozenset({"mrope_section", "mrope_interleaved"})
"""Parameters that divide a head among three positions (`nn.mrope`)."""
_TRAINED_LENGTH = frozenset({"llama3", "yarn", "longrope"})


@dataclass(frozen=True, slots=True)
class MRopeLayout:
    """Layout of heads with three positions, which a config has by `mrope_section`."""

    interleaved: bool | None
    """True if neighbouring pairs turn by different positions, False if each position has one range of pairs; None: as the config says."""
    sections: tuple[int, int, int] | None = None
    """Sections of a config without any; None for a family that then has one position."""

    def divided(self, parameters: Mapping[str, Any], rope: Rope) -> Rope:
        """Return the rope with an axis for each pair, or unchanged without sections. Raises `UnsupportedModelError`."""
        sections, pairs = parameters.get("mrope_section", self.sections), rope.dims // 2
        if sections is None:
            return rope
        if not isinstance(sections, (list, tuple)) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
            raise UnsupportedModelError(f"config.json: rope parameter mrope_section is {str(sections)[:40]}, must be three counts of pairs")
        usual = False if self.interleaved is None else self.interleaved
        interleaved = parameters.get("mrope_interleaved", usual)
        if not isinstance(interleaved, bool) or self.interleaved not in (None, interleaved):
            raise UnsupportedModelError(f"config.json: rope parameter mrope_interleaved must be {str(usual).lower()} for this model")
        if rope.boundary is not None or rope.regime(1) != rope.regime(1 << 40):
            raise UnsupportedModelError(
                "config.json: rope parameter mrope_section is not supported with a rope that changes with the length"
            )
        if interleaved:
            return MRope.of(rope, interleaved_axes(sections, pairs))
        if sum(sections) != pairs:
            raise UnsupportedModelError(f"config.json: rope parameter mrope_section is {sections}, must add up to {pairs} pairs")
        return MRope.of(rope, chunked_axes(sections))


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    trained: int | None = None,
    otherwise: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    ignored: frozenset[str] = frozenset(),
    mrope: MRopeLayout | None = None,
) -> Rope:
    """Read the rope of a model with a single one.

    `theta`, `partial` and `trained` (length) are the family's defaults, `otherwise` the parameters of a config without any. A family
    without a default of `partial` rotates whole heads only. `mrope` is the layout of a family whose heads may have three positions.
    """
    scaling, new_style = rope_mapping(reader, "rope_scaling"), rope_mapping(reader, "rope_parameters")
    own = {
        "rope_theta": reader.optional_number("rope_theta") or theta,
        "partial_rotary_factor": reader.optional_number("partial_rotary_factor") or partial or 1.0,
    }
    parameters = own | dict(scaling or new_style or otherwise or {})
    own_trained = reader.optional_integer("original_max_position_embeddings", trained)
    if own_trained is not None:
        parameters["original_max_position_embeddings"] = own_trained
    if partial is None and parameters["partial_rotary_factor"] != 1:
        raise reader.bad("partial_rotary_factor", parameters["partial_rotary_factor"], "1 for this model")
    if mrope is None:
        return checked_rope(parameters, head_dim, max_positions, aliases=aliases, ignored=ignored)
    rope = checked_rope(parameters, head_dim, max_positions, aliases={**(aliases or {}), "mrope": "default"}, ignored=ignored | _MROPE)
    return mrope.divided(parameters, rope)


def read_rope_by_layer(
    reader: ConfigReader,
    head_dim: int | Mapping[str, int],
    max_positions: int,
    *,
    theta: Mapping[str, tuple[str, float]],
    scaled: str,
    others: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Rope]:
    """Read one rope per kind of layer; `head_dim` is common or by kind.

    `theta` maps a kind to (old style's key, default), `others` to further defaults. The old style's scaling applies to the kind `scaled`.
    """
    by_kind = rope_mapping(reader, "rope_parameters")
    for kind, given in by_kind.items():
        if kind not in theta or not isinstance(given, dict):
            raise reader.bad(f"rope_parameters.{kind}", given, f"one of {', '.join(theta)}, each with an object")
    by_kind[scaled] = by_kind.get(scaled, {}) | rope_mapping(reader, "rope_scaling")
    ropes = {}
    for kind, (key, default) in theta.items():
        own = {"rope_theta": reader.optional_number(key) or default}
        given = {name: value for name, value in by_kind.get(kind, {}).items() if value is not None}
        dim = head_dim if isinstance(head_dim, int) else head_dim[kind]
        ropes[kind] = checked_rope({**(others or {}).get(kind, {}), **own, **given}, dim, max_positions)
        # These configs already count the scaled positions.
        ropes[kind].context = max_positions
    return ropes


def checked_rope(
    parameters: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    *,
    aliases: Mapping[str, str] | None = None,
    ignored: frozenset[str] = frozenset(),
) -> Rope:
    """Check the parameters of one rope and create it. Raises `UnsupportedModelError` with the unsupported parameter."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = (aliases or {}).get(str(kind), kind)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"config.json: rope type {kind!r} is not supported (known: {', '.join(ROPE_TYPES)})")
    for key, value in parameters.items():
        if key not in _COMMON | _OWN[kind] | ignored:
            unknown = f"rope parameter {key} = {str(value)[:40]} is not understood with type {kind!r}"
            raise UnsupportedModelError(f"config.json: {unknown}; {way_on(key)}")
    clean = {"partial_rotary_factor": 1.0} | dict(parameters)
    if kind in _TRAINED_LENGTH:
        clean.setdefault("original_max_position_embeddings", max_positions)
    clean["rope_type"] = kind
    _check_values(clean, kind)
    if kind == "longrope":
        _check_factors(clean, (int(head_dim * clean["partial_rotary_factor"]) + 1) // 2)
    try:
        rope = make_rope(clean, head_dim, max_positions)
    except ArithmeticError as error:
        raise UnsupportedModelError(f"config.json: the rope parameters of type {kind!r} have no meaning: {error}") from error
    turned = clean["partial_rotary_factor"]
    if not 0 < rope.dims <= head_dim or (kind == "yarn" and int(head_dim * turned) % 2):
        raise UnsupportedModelError(f"config.json: partial_rotary_factor {turned} of {head_dim} channels is not a whole number of pairs")
    return rope


def rope_mapping(reader: ConfigReader, key: str) -> dict[str, Any]:
    """Return the object under this key without nulls and ignored keys; {} for a missing key."""
    value = reader.take(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise reader.bad(key, value, "an object")
    return {name: _stated_only(reader, name, item) for name, item in value.items() if not _says_nothing(reader, name, item)}


def _stated_only(reader: ConfigReader, name: str, item: Any) -> Any:
    """Return the parameters of a kind of layer, filtered like those of the whole model."""
    if not isinstance(item, dict):
        return item
    return {inner: value for inner, value in item.items() if not _says_nothing(reader, inner, value)}


def _says_nothing(reader: ConfigReader, name: str, value: object) -> bool:
    if name in reader.ignored and name in _UNDERSTOOD:
        raise reader.error(name, "is read as a parameter of the rope: it cannot be ignored")
    return value is None or name in reader.ignored or (name in _OPTIONAL_SCALES and value == 0 and not isinstance(value, bool))


def _check_values(parameters: Mapping[str, Any], kind: str) -> None:
    for key in _REQUIRED.get(kind, ()):
        if key not in parameters:
            raise UnsupportedModelError(f"config.json: rope type {kind!r} needs {key}")
    for key, value in parameters.items():
        if key in ("rope_type", "type"):
            continue
        if key in ("short_factor", "long_factor"):
            right = isinstance(value, list) and all(is_number(item) and item > 0 for item in value)
        elif key == "truncate":
            right = isinstance(value, bool)
        else:
            right = key not in _POSITIVE or (is_number(value) and value > 0)
        if not right:
            raise UnsupportedModelError(f"config.json: rope parameter {key} is {str(value)[:40]}, which has no meaning")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise UnsupportedModelError("config.json: rope parameter high_freq_factor must be above low_freq_factor")
    if not 0 < parameters["partial_rotary_factor"] <= 1:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor is {parameters['partial_rotary_factor']}, must be above 0 to 1")


def _check_factors(parameters: Mapping[str, Any], pairs: int) -> None:
    for key in ("short_factor", "long_factor"):
        count = len(parameters[key])
        if count != pairs:
            raise UnsupportedModelError(f"config.json: rope parameter {key} has {count} values, this head needs {pairs}")
