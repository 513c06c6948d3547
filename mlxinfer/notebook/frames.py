"""Conversion of results to pandas, an optional dependency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from math import exp
from typing import Any

from ..errors import MLXInferError, SettingError
from ..interpret.trace import LogitLens
from ..types import Completion
from ..util.installing import install_line


def frame(rows: Iterable[Mapping[str, object]]) -> Any:
    """Return rows as a `pandas.DataFrame`. Raises `MLXInferError` without pandas."""
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise MLXInferError(f"tables need pandas: {install_line('pandas')}") from error
    return pandas.DataFrame(list(rows))


def to_pandas(values: Any) -> Any:
    """Return a result as a `pandas.DataFrame`:

    - an answer with `SamplingParams(logprobs=N)`: a row per token
    - a `LogitLens`: a row per layer and token
    - a list of results, such as `llm.score(...)` or an evaluation's: a row per result
    - an object with a method `to_pandas`, such as a `Comparison`

    Raises `SettingError` for anything else, and `MLXInferError` without pandas.
    """
    own = getattr(values, "to_pandas", None)
    if own is not None:
        return own()
    if isinstance(values, Completion):
        if not values.logprobs:
            raise SettingError("this answer has no log-probabilities: generate it with logprobs=2")
        return to_pandas(values.logprobs)
    if isinstance(values, LogitLens):
        return frame(_lens_rows(values))
    if isinstance(values, (list, tuple)) and values and all(is_dataclass(each) for each in values):
        return frame(_row(each) for each in values)
    raise SettingError(
        f"a {type(values).__name__} is no table: to_pandas takes answers with log-probabilities, lenses and lists of results"
    )


def _row(value: Any) -> dict[str, object]:
    found = asdict(value)
    if "logprob" in found and "probability" not in found:
        found["probability"] = exp(found["logprob"])
    return found


def _lens_rows(lens: LogitLens) -> Iterable[dict[str, object]]:
    names = ("probability", "final_probability", "entropy")
    columns: list[Any] = [getattr(lens, name).tolist() for name in names]
    for row, layer in enumerate(lens.layers):
        for position, text in enumerate(lens.texts[row]):
            yield {"layer": layer, "position": position, "text": text} | {
                name: values[row][position] for name, values in zip(names, columns, strict=True)
            }
