"""HTML display of models, answers and statistics as results of a cell."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from html import escape
from math import exp
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from ..types import Completion, EngineStats, TokenLogprob
from ..util.words import counted
from .html import MUTED, TEXT, shaded, table

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM
    from ..engine.llm import LLM

_SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""Pattern of special tokens, such as `<|im_end|>`, `</s>` and `[INST]`."""


def register(shell: Any) -> None:
    """Register the HTML display of mlxinfer's objects in an IPython shell. Their plain text is unchanged."""
    html = shell.display_formatter.formatters["text/html"]
    html.for_type(list, _list_html)
    for (module, name), made in _by_type().items():
        html.for_type_by_name(module, name, made)


def _by_type() -> dict[tuple[str, str], Callable[[Any], str | None]]:
    """Return HTML functions by (module, class name), so that classes need not be imported."""
    return {
        ("mlxinfer.types", "Completion"): completion_html,
        ("mlxinfer.types", "EngineStats"): stats_html,
        ("mlxinfer.engine.llm", "LLM"): model_html,
        ("mlxinfer.engine.async_llm", "AsyncLLM"): model_html,
        ("mlxinfer.convert.report", "Report"): conversion_html,
        ("mlxinfer.evaluation.measure", "Comparison"): evaluation_html,
        ("mlxinfer.evaluation.kv", "KVEvaluation"): kv_html,
        ("mlxinfer.interpret.trace", "Trace"): _trace_html,
        ("mlxinfer.interpret.trace", "LogitLens"): _lens_html,
    }


def _trace_html(trace: Any) -> str:
    from .traces import trace_html

    return trace_html(trace)


def _lens_html(lens: Any) -> str:
    from .traces import lens_html

    return lens_html(lens)


@dataclass(frozen=True, slots=True)
class Html:
    """HTML as a cell's result in any front end."""

    html: str
    """Self-contained HTML in the notebook's colours."""

    def _repr_html_(self) -> str:
        return self.html


def show(value: Any) -> Html:
    """Return the HTML of an answer, a list of answers, a model, statistics, a conversion or an evaluation.

    For front ends without `%load_ext`, such as marimo. Raises `SettingError` for anything else.
    """
    own, kind = getattr(value, "_repr_html_", None), type(value)
    made = _list_html if isinstance(value, list) else _by_type().get((kind.__module__, kind.__name__))
    found = own() if own else made(value) if made else None
    if found is None:
        raise SettingError(f"show cannot display a {type(value).__name__}: it takes answers, models, statistics, traces and reports")
    return Html(found)


def evaluation_html(found: Any) -> str:
    """Return the loss of each student of a comparison, with standard errors."""
    rows = [_figures_line(each) for each in (found.teacher, *found.students)]
    notes = "".join(f'<div style="{MUTED}">{escape(note)}</div>' for note in found.notes)
    return f"<div>{table(('model', 'MB', 'bits per weight', 'KL', 'same top token', 'perplexity'), rows)}{notes}</div>"


def _figures_line(each: Any) -> tuple[str, ...]:
    size = (each.model, f"{each.nbytes / 1e6:,.1f}", f"{each.bpw:.2f}")
    if each.kl_mean is None:
        return *size, "", "", f"{each.ppl:.2f}"
    return *size, f"{each.kl_mean:.4g}{_error(each.kl_stderr)}", f"{each.top1:.1%}", f"{each.ppl:.2f}"


def kv_html(found: Any) -> str:
    """Return the loss of each cache format, and the choice of `auto`."""
    rows = [
        (f"{each.kv} (auto)" if each.kv == found.auto else each.kv, f"{each.kl_mean:.4g}{_error(each.kl_stderr)}", f"{each.top1:.1%}")
        for each in found.formats
    ]
    return table((f"cache of {found.model}", "KL", "same top token"), rows)


def _error(stderr: float | None) -> str:
    return "" if stderr is None else f" ± {stderr:.1g}"


def completion_html(completion: Completion) -> str:
    """Return an answer with tokens shaded by probability (with `SamplingParams(logprobs=...)`) and alternatives in tooltips."""
    usage = completion.usage
    parts = [counted(usage.completion_tokens, "token"), completion.finish_reason]
    parts += [f"{usage.decode_tps:.1f} tokens/s"] if usage.decode_tps else []
    body = "".join(map(_token, _spoken(completion))) if completion.logprobs else escape(completion.text)
    thought = ""
    if completion.reasoning:
        thought = f'<details style="{MUTED}"><summary>thought</summary><div style="{TEXT}">{escape(completion.reasoning)}</div></details>'
    calls = "".join(f"<div><code>{escape(call.name)}({escape(call.arguments)})</code></div>" for call in completion.tool_calls)
    return f'<div>{thought}<div style="{TEXT}">{body}</div>{calls}<div style="{MUTED}">{escape(" · ".join(parts))}</div></div>'


def _spoken(completion: Completion) -> list[TokenLogprob]:
    """Return the tokens of the answer's text, without end tokens and tokens around reasoning and calls.

    If the text is not found in the tokens, because characters span several, special tokens are dropped by their spelling.
    """
    tokens, text = completion.logprobs or [], completion.text
    start = "".join(token.text for token in tokens).rfind(text) if text else -1
    if start < 0:
        return [token for token in tokens if not _SPECIAL.fullmatch(token.text) or token.text in text]
    found, place = [], 0
    for token in tokens:
        piece = token.text[max(start - place, 0) : max(start + len(text) - place, 0)]
        place += len(token.text)
        if piece:
            found.append(replace(token, text=piece))
    return found


def _token(token: TokenLogprob) -> str:
    others = "".join(f"&#10;{exp(logprob):6.1%}  {escape(repr(text))}" for _, text, logprob in token.top)
    return shaded(token.text, exp(token.logprob), others)


def _list_html(values: list[Any]) -> str | None:
    """Return completions side by side; None for any other list, which shows its text."""
    if not values or not all(isinstance(value, Completion) for value in values):
        return None
    columns = "".join(f'<div style="flex:1 1 18em;min-width:14em">{completion_html(value)}</div>' for value in values)
    return f'<div style="display:flex;flex-wrap:wrap;gap:1.5em">{columns}</div>'


def stats_html(stats: EngineStats) -> str:
    """Return all numbers except zeros."""
    rows = [(each.name.replace("_", " "), _number(getattr(stats, each.name))) for each in fields(stats) if getattr(stats, each.name)]
    return table(("", ""), rows)


def model_html(llm: LLM | AsyncLLM) -> str:
    """Return a model's properties and memory in a few lines."""
    if getattr(llm, "ended", False):
        return f'<div style="{MUTED}">a closed {type(llm).__name__}</div>'
    plan = llm.plan
    rows = [
        ("architecture", str(llm.config.get("model_type", ""))),
        ("weights", f"{llm.weight_bytes / 1e6:,.0f} MB, computed in {str(llm.dtype).rpartition('.')[2]}"),
        ("context", f"{llm.max_context:,} tokens, cache at {llm.kv.name} bits"),
        ("memory", f"{plan.in_use(llm.stats()) / 1e9:.2f} GB in use, {plan.used / 1e9:.2f} GB at most"),
    ]
    notes = "".join(f'<div style="{MUTED}">{escape(note)}</div>' for note in llm.notes)
    return f"<div><b>{escape(llm.name)}</b>{table(('', ''), rows)}{notes}</div>"


def conversion_html(report: Any) -> str:
    """Return the output and loss of a conversion, with folded tensors."""
    rows = [
        ("written", f"{report.nbytes / 1e6:,.1f} MB, {report.bits_per_weight:.2f} bits per weight"),
        ("source", f"{report.source_nbytes / 1e6:,.1f} MB"),
        ("tensors", ", ".join(f"{count} {action}" for action, count in report.actions.items())),
    ]
    if report.quality is not None:
        rows.append(("loss", f"KL {report.quality.kl:.4g}, the same likeliest token at {report.quality.top1:.1%}"))
        rows.append(("", report.quality.verdict))
    tensors = [(t.name, " × ".join(map(str, t.shape)), t.action, t.stored, f"{t.error:.4f}" if t.error else "") for t in report.tensors]
    details = table(("tensor", "shape", "action", "stored", "error"), tensors)
    return f"<div>{table(('', ''), rows)}<details><summary>{counted(len(tensors), 'tensor')}</summary>{details}</details></div>"


def _number(value: float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
