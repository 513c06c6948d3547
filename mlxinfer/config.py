"""Settings of an engine: `EngineArgs` has those of callers, `EngineConfig` those derived for the running engine.

Command line options, the keywords of `LLM` and `AsyncLLM`, and the table in docs/settings.md are generated from `EngineArgs`. To add
a setting, add a field there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SamplingError, SettingError, UnknownKeywordError
from .types import SamplingParams
from .util.dataclass import dataclass

if TYPE_CHECKING:
    import mlx.core as mx

MAX_DRAFT = 8
"""Maximum tokens drafted for a sequence in one step."""
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid adapter names. `latest` is a tag of whole models."""
MAX_NUM_SEQS = 16
"""Default of concurrently running sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Help text, bounds and command line spelling of a field of `EngineArgs`."""

    meaning: str
    """One line of help, without a full stop."""
    unit: str = ""
    """Unit of a number, such as "tokens" or "GB"."""
    automatic: str = ""
    """Meaning of None."""
    flag: str = ""
    """Name of the option, if it differs from the field's."""
    metavar: str = ""
    """Placeholder of the value in the help text, if the type is not enough."""
    command: str = "all"
    """Commands with the option: "all", "answering" for those that answer requests (not `bench`), "serving" for `serve`, or "none"."""
    least: float | None = None
    """Smallest value."""
    most: float | None = None
    """Largest value."""
    above: float | None = None
    """Exclusive lower bound."""
    words: tuple[str, ...] = ()
    """Words that are accepted instead of a number."""

    def problem(self, kind: str, value: object) -> str | None:
        """Return the fault of a value, such as "must be a whole number of at least 1, not 0", or None for a valid one."""
        if kind == "bool":
            return None if isinstance(value, bool) else f"must be true or false, not {value!r}"
        if kind not in ("int", "float") or value in self.words:
            return None
        accepted = (int,) if kind == "int" else (int, float)
        inside = isinstance(value, accepted) and not isinstance(value, bool) and math.isfinite(value) and self._holds(value)
        words = "".join(f"{word}, or " for word in self.words)
        return None if inside else f"must be {words}{'a whole number' if kind == 'int' else 'a number'}{self._range()}, not {value!r}"

    def _holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )

    def _range(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        low = f"above {self.above}" if self.above is not None else f"of at least {self.least}" if self.least is not None else ""
        high = f"at most {self.most}" if self.most is not None else ""
        bounds = " and ".join(bound for bound in (low, high) if bound)
        return f" {bounds}{unit}" if bounds else unit


def about(meaning: str, **details: Any) -> dict[str, Setting]:
    """Return the metadata of a field of `EngineArgs`, from the fields of its `Setting`."""
    return {"setting": Setting(meaning=meaning, **details)}


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Settings of a model and its engine, explained in each field's metadata and in docs/settings.md.

    Raises `SettingError` for an invalid value.
    """

    path_or_id: str | Path = field(metadata=about("Directory (Hugging Face or MLX), GGUF file, alias or hub id"))
    dtype: str | mx.Dtype | None = field(
        default=None, metadata=about("Compute in float32, bfloat16 or float16", automatic="what suits the device", metavar="DTYPE")
    )
    kv: str = field(default="16", metadata=about("Bits of cached keys and values: 16, 8, 6, 5, 4, 3, 2, as k8v4, or auto", unit="bits"))
    _: KW_ONLY
    kv_first16: bool = field(default=False, metadata=about("Keep the first page of each sequence at 16 bits, with kv"))
    bits: int | None = field(
        default=None, metadata=about("Quantize the weights while loading", unit="bits", automatic="as they are stored", least=1)
    )
    group_size: int = field(default=64, metadata=about("Weights that share a scale, with bits", unit="weights", least=1))
    gguf_exact: bool = field(
        default=False, metadata=about("On a GPU, unpack types of GGUF files to 16 bits where packing would round them")
    )
    ignore_config_keys: Sequence[str] = field(
        default=(),
        metadata=about(
            "Load the model although its config.json has this key, which is not understood and may change its answers",
            automatic="none",
            flag="--ignore-config-key",
            metavar="KEY",
        ),
    )
    max_context: int | None = field(
        default=None,
        metadata=about("Longest sequence, prompt and answer together", unit="tokens", automatic="what the model and the memory allow"),
    )
    max_num_seqs: int = field(default=MAX_NUM_SEQS, metadata=about("Sequences that run together; others wait", unit="sequences", least=1))
    memory_gb: float | None = field(
        default=None,
        metadata=about(
            "Memory for weights, cache and a step together",
            unit="GB",
            automatic="what the device has",
            flag="--memory",
            above=0,
            most=1_000_000,
        ),
    )
    experts_memory: float | str | None = field(
        default="auto",
        metadata=about(
            "Memory for the routed experts of a model, of which the rest is read from the disk; auto: only if they do not fit; 0: never",
            unit="GB",
            automatic="auto",
            metavar="GB|auto",
            least=0,
            most=1_000_000,
            words=("auto",),
        ),
    )
    deterministic: bool = field(default=False, metadata=about("Compute every row in the same shapes whatever runs beside it, on a GPU too"))
    vision: str = field(
        default="auto",
        metadata=about(
            "Load the tower that sees images: auto (if the files have one that is supported), on (or refuse the model), off",
            flag="--vision/--no-vision",
        ),
    )
    mmproj: str | Path | None = field(
        default=None,
        metadata=about("GGUF file with the vision tower of a GGUF model", automatic="the one beside the model", metavar="FILE"),
    )
    tool_format: str | None = field(
        default=None,
        metadata=about(
            "How the model writes calls of tools, such as hermes",
            automatic="as its chat template does",
            metavar="NAME",
            command="answering",
        ),
    )
    max_pixels: int | None = field(
        default=None,
        metadata=about(
            "Scale images down to this many pixels",
            unit="pixels",
            automatic="the model's limit, as far as memory allows",
            least=1,
            command="answering",
        ),
    )
    min_pixels: int | None = field(
        default=None,
        metadata=about(
            "Scale smaller images up to this many pixels", unit="pixels", automatic="the model's limit", least=1, command="answering"
        ),
    )
    draft: str | Path | None = field(
        default=None,
        metadata=about(
            "Draft model for speculative decoding: a smaller one of the same vocabulary, a head, or mtp for the head in the checkpoint",
            automatic="none",
            metavar="MODEL",
            command="answering",
        ),
    )
    adapters: Mapping[str, str | Path] | None = field(
        default=None,
        metadata=about(
            "LoRA adapters that requests can ask for, by name: folders of PEFT or mlx-lm, or GGUF files",
            automatic="none",
            flag="--adapter",
            metavar="NAME=PATH",
            command="answering",
        ),
    )
    adapter_memory_gb: float = field(
        default=0.0,
        metadata=about(
            "Memory for adapters that are loaded while the model runs",
            unit="GB",
            flag="--adapter-memory",
            least=0,
            most=1_000_000,
            command="answering",
        ),
    )
    speculate: bool = field(
        default=True, metadata=about("Let text that repeats itself propose tokens; answers are the same", command="answering")
    )
    prefix_cache: bool = field(default=True, metadata=about("Keep what was computed for prompts that begin alike", command="answering"))
    prefix_disk_gb: float = field(
        default=0.0,
        metadata=about(
            "Keep this much of it on disk too, for later processes",
            unit="GB",
            flag="--prefix-disk",
            least=0,
            most=1_000_000,
            command="answering",
        ),
    )
    prefix_dir: str | Path | None = field(
        default=None,
        metadata=about("Folder for that", automatic="prefix in the cache folder", metavar="DIRECTORY", command="answering"),
    )
    prefill_from: str | None = field(
        default=None,
        metadata=about(
            "Have this server read long prompts, one that runs with --kv-producer, and fetch their keys and values",
            automatic="read them here",
            metavar="URL",
            command="answering",
        ),
    )
    kv_producer: bool = field(
        default=False, metadata=about("Hand out keys and values of prompts to servers with --prefill-from", command="serving")
    )
    max_waiting: int = field(
        default=1024, metadata=about("Requests that may wait; more are refused", unit="requests", least=1, command="answering")
    )
    decode_share: float = field(
        default=0.8,
        metadata=about("Share of their speed that running answers keep while prompts are read", above=0, most=1, command="answering"),
    )
    max_step_s: float = field(
        default=0.1,
        metadata=about("Longest step while prompts are read beside answers", unit="s", above=0, most=3600, command="answering"),
    )

    def __post_init__(self) -> None:
        for one, how in settings():
            value = getattr(self, one.name)
            problem = None if value is None and may_be_none(one) else how.problem(kind_of(one), value)
            if problem:
                raise SettingError(f"{one.name} {problem}")
        if self.adapters is not None:
            _check_adapters(self.adapters)
        _check_keys(self.ignore_config_keys)
        _check_vision(self)
        _check_hand_over(self)

    @property
    def max_draft(self) -> int:
        """Maximum tokens drafted for a sequence in one step; 0 without a drafter."""
        return MAX_DRAFT if self.speculate or self.draft is not None else 0


def _check_keys(keys: object) -> None:
    if isinstance(keys, str) or not isinstance(keys, Sequence) or not all(isinstance(key, str) and key for key in keys):
        raise SettingError(f"ignore_config_keys must be a list of keys of config.json, such as ['some_key'], not {keys!r}")


VISION_MODES = ("auto", "on", "off")
"""Values of `EngineArgs.vision`."""


def _check_vision(args: EngineArgs) -> None:
    if args.vision not in VISION_MODES:
        raise SettingError(f"vision must be auto, on or off, not {args.vision!r}")
    given = [name for name in ("mmproj", "max_pixels", "min_pixels") if getattr(args, name) is not None]
    if given and args.vision == "off":
        raise SettingError(f"{given[0]} is for images, which vision=off (--no-vision) switches off: leave one of them out")
    if args.max_pixels is not None and args.min_pixels is not None and args.min_pixels > args.max_pixels:
        raise SettingError(f"min_pixels is {args.min_pixels}, above max_pixels ({args.max_pixels})")


def _check_hand_over(args: EngineArgs) -> None:
    if args.kv_producer and not args.prefix_cache:
        raise SettingError("kv_producer needs the prefix cache: keep prefix_cache")
    if args.prefill_from is None:
        return
    if not _is_address(args.prefill_from):
        raise SettingError(f"prefill_from: {args.prefill_from!r} is no address such as http://studio.local:8080")
    if args.kv_producer:  # two consumers would ask each other forever
        raise SettingError("prefill_from and kv_producer: a server has its prompts read, or reads those of others, not both")
    if args.prefix_disk_gb or not args.prefix_cache:
        raise SettingError("prefill_from needs the prefix cache, in memory: leave out prefix_disk_gb, and keep prefix_cache")


def _is_address(url: object) -> bool:
    from urllib.parse import urlsplit  # only for an address

    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not more
    except ValueError:  # of the port
        return False


def _check_adapters(adapters: object) -> None:
    if not isinstance(adapters, Mapping) or not all(isinstance(path, (str, Path)) for path in adapters.values()):
        raise SettingError(f"adapters must map names to paths, such as {{'name': 'path'}}, not {adapters!r}")
    for name in adapters:
        check_adapter_name(name)


def check_adapter_name(name: object) -> None:
    """Raise `SettingError` for an invalid adapter name."""
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name) or name == "latest":
        raise SettingError(f"adapters: {name!r} cannot be a name: up to 64 letters, digits and . _ -, and not latest")


OLDER_NAMES = {"max_sequences": "max_num_seqs"}
"""Former names of fields, accepted as keywords and, with hyphens, as options."""


def settings(owner: type[Any] = EngineArgs) -> Iterator[tuple[Field[Any], Setting]]:
    """Yield the fields of `owner` in order, with the `Setting` of each."""
    for one in fields(owner):
        yield one, one.metadata["setting"]


def kind_of(one: Field[Any]) -> str:
    """Return the first type of a field's annotation: "str", "int", "float" or "bool"."""
    return str(one.type).split(" | ")[0]


def may_be_none(one: Field[Any]) -> bool:
    return str(one.type).endswith("None")


def flags_of(one: Field[Any], how: Setting) -> list[str]:
    """Return the spellings of a setting's option; the first one is shown."""
    older = [f"--{old.replace('_', '-')}" for old, name in OLDER_NAMES.items() if name == one.name]
    return [how.flag or f"--{one.name.replace('_', '-')}", *older]


def default_text(one: Field[Any], how: Setting) -> str:
    """Return a default for people."""
    if one.default is None or one.default == ():
        return how.automatic
    if isinstance(one.default, bool):
        return str(one.default).lower()
    return f"{one.default:g}" if isinstance(one.default, float) else str(one.default)


def keyword_docs(*, indent: str = "    ") -> str:
    """Return one line for each setting, for docstrings."""
    lines = []
    for one, how in settings():
        details = ", ".join(part for part in (how.unit, f"default: {default_text(one, how)}" if one.default is not MISSING else "") if part)
        lines.append(f"{indent}{one.name}: {how.meaning}{f' ({details})' if details else ''}.")
    return "\n".join(lines)


def settings_table(owner: type[Any] = EngineArgs) -> str:
    """Return the Markdown table of a class of settings. `python -m mlxinfer.config` prints that of docs/settings.md."""
    rows = ["| keyword | option | unit | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for one, how in settings(owner):
        option = "MODEL" if one.name == "path_or_id" else "" if how.command == "none" else f"`{flags_of(one, how)[0]}`"
        if one.default is True:
            option = f"`--no-{one.name.replace('_', '-')}`"
        default = "" if one.default is MISSING else default_text(one, how)
        rows.append(f"| `{one.name}` | {option} | {how.unit} | {default} | {how.meaning} |")
    return "\n".join(rows) + "\n"


def unknown_keyword(where: str, name: str, known: Mapping[str, object] | list[str], advice: str = "") -> UnknownKeywordError:
    """Return the error for a keyword that `where` does not have, with the most similar one of `known`."""
    from difflib import get_close_matches  # only for an error

    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = advice or (f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}")
    return UnknownKeywordError(f"{where} has no keyword {name!r}: {hint}")


_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(EngineArgs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of a running engine, after its memory was planned."""

    max_context: int
    """Maximum tokens of a sequence, prompt and answer together."""
    kv_cache_tokens: int
    """Capacity of the page pool in tokens, for running sequences and for reuse."""
    max_num_batched_tokens: int = 512
    """Maximum rows of a step, and so of a prompt's chunk."""
    max_scored_rows: int = 2**31
    """Maximum prompt rows per step whose logits are computed, for requests that score their prompt."""
    max_num_seqs: int = _DEFAULTS["max_num_seqs"]
    """Maximum concurrently running sequences."""
    max_waiting: int = _DEFAULTS["max_waiting"]
    """Maximum waiting requests; more are refused with `QueueFullError`."""
    prefix_cache: bool = _DEFAULTS["prefix_cache"]
    """True to cache pages for prompts with the same beginning."""
    prefix_cache_tokens: int = 2**20
    """Maximum tokens of the pool that are kept for reuse."""
    snapshot_bytes: int = 256 * 2**20
    """Maximum bytes of open pages and recurrent states that are kept for reuse."""
    decode_share: float = _DEFAULTS["decode_share"]
    """Share of their speed that running answers keep during prefill, above 0 and at most 1."""
    max_step_s: float = _DEFAULTS["max_step_s"]
    """Maximum seconds of a step that reads prompts while answers run."""
    max_draft: int = MAX_DRAFT
    """Maximum tokens drafted for a sequence in one step; 0 drafts none."""
    ngrams: bool = True
    """True to draft tokens from n-grams of the text, in addition to a draft model."""
    deterministic: bool = _DEFAULTS["deterministic"]
    """True to compute every row in the same shapes, whatever else runs."""
    image_features_bytes: int = 256 * 2**20
    """Maximum bytes of image features that are kept for reuse."""


_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of `generation_config.json`, or greedy ones if it does not sample. Every field is set."""
    values = {k: generation_config[k] for k in _RECOMMENDED if generation_config.get(k) is not None}
    greedy = SamplingParams(temperature=0.0).resolved()
    if not generation_config.get("do_sample", "temperature" in values):
        return greedy
    try:
        return SamplingParams(**values).resolved()
    except SamplingError:
        return greedy


CHAT_TEMPERATURE = 0.7
"""Temperature of a conversation with a model whose authors recommend no sampling."""


def chat_params(defaults: SamplingParams) -> SamplingParams:
    """Return the defaults of a person's conversation: `defaults`, with `CHAT_TEMPERATURE` instead of greedy decoding, and `stop_on_loop`.

    A greedy answer is the same each time it is asked for, and small models loop in it. Python and the API keep `defaults`.
    """
    return replace(defaults, stop_on_loop=True, temperature=CHAT_TEMPERATURE if defaults.greedy else defaults.temperature)


if __name__ == "__main__":
    from .util.environment import environment_table

    print(settings_table(), environment_table(), sep="\n", end="")  # noqa: T201
