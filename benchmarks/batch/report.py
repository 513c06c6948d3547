"""Tables of results, in Markdown, and the goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..common.report import caption, cell, markdown, number, ratio, versions, warnings
from ..common.samples import Results, Spread
from .texts import STORIES
from .workloads import (
    ALONE,
    BESIDE,
    COLD,
    DETERMINISTIC,
    DISK,
    EDIT,
    FIRST_BESIDE,
    FREE,
    LLAMA,
    MLX_LM,
    OURS,
    SERVERS,
    UNDRAFTED,
    WARM,
    streams_name,
    turn_name,
)


def document(models: list[Results], about: dict[str, Any]) -> str:
    parts = [f"{caption(about)}\n\n{versions(about)}"]
    for results in models:
        described = about["models"][results.model]
        parts.append(f"## {results.model} ({described['file']})\n\n{_servers(described)}")
        parts += [f"### {title}\n\n{text}" for title, text in sections(results) if text]
        said = [line for line in warnings(described, results) if line]
        parts.append("\n".join(f"- {line}" for line in [*goals(results), *said]))
    return "\n\n".join(parts) + "\n"


def _servers(described: dict[str, Any]) -> str:
    found = [f"{engine} {about['version']}" for engine, about in described["engines"].items() if not engine.startswith(OURS)]
    return f"Compared with {', '.join(found)}." if found else "This project alone."


def sections(results: Results) -> Iterator[tuple[str, str]]:
    yield "Tokens per second of several streams together", streams_table(results)
    yield "A stream while a long prompt is read", beside_table(results)
    yield "First token after a long prefix", prefix_table(results)
    yield "A conversation: tokens read, and time to the first token", conversation_table(results)
    yield "Drafts from the text itself", drafts_table(results)


def streams_table(results: Results) -> str:
    rows = [["", "mlxinfer", "of one stream", LLAMA, MLX_LM, f"mlxinfer / {LLAMA}", f"mlxinfer / {MLX_LM}", "deterministic", "its part"]]
    for work in streams_found(results):
        rows.append(
            [
                work,
                cell(results, work, UNDRAFTED),
                ratio(results.better((work, UNDRAFTED), (streams_name(1), UNDRAFTED))),
                *(cell(results, work, engine) for engine in (LLAMA, MLX_LM)),
                *(ratio(results.better((work, UNDRAFTED), (work, engine))) for engine in (LLAMA, MLX_LM)),
                cell(results, work, DETERMINISTIC),
                percent(results.part((work, DETERMINISTIC), (work, UNDRAFTED))),
            ]
        )
    return markdown(rows)


def streams_found(results: Results) -> list[str]:
    return [streams_name(n) for n in range(1, 257) if results.of(streams_name(n), UNDRAFTED)]


def beside_table(results: Results) -> str:
    rows = [["tokens/s", "alone", "beside the prompt", "its part", "first token of the prompt"]]
    for engine in _engines(results, ALONE):
        part = percent(results.part((BESIDE, engine), (ALONE, engine)))
        rows.append([engine, cell(results, ALONE, engine), cell(results, BESIDE, engine), part, cell(results, FIRST_BESIDE, engine)])
    return markdown(rows)


def prefix_table(results: Results) -> str:
    rows = [["", "cold", "warm", "part of cold", "tokens read", "from disk, in a new process", "part of cold", "tokens read"]]
    for engine in _engines(results, COLD):
        row = [engine, cell(results, COLD, engine)]
        for work in (WARM, DISK):
            part = percent(results.part((work, engine), (COLD, engine)))
            row += [cell(results, work, engine), part, plain(results, f"{work}: tokens read", engine)]
        rows.append(row)
    return markdown(rows)


def conversation_table(results: Results) -> str:
    engines = _engines(results, turn_name(1, "read"))
    rows = [["turn", *(f"{engine}: {what}" for engine in engines for what in ("new", "read", "first token"))]]
    for turn in turns_found(results):
        row = [str(turn)]
        for engine in engines:
            row += [plain(results, turn_name(turn, what), engine) for what in ("new", "read")]
            row.append(cell(results, turn_name(turn, "first token"), engine, spread=False))
        rows.append(row)
    return markdown(rows)


def turns_found(results: Results) -> list[int]:
    return [turn for turn in range(1, 100) if turn_name(turn, "read") in results.works]


def drafts_table(results: Results) -> str:
    rows = [["tokens/s", "with drafts", "without", "with / without", "drafted tokens accepted", "same answers"]]
    for work in [f"{kind}, {streams_name(n)}" for kind in (EDIT, FREE) for n in (1, len(STORIES))]:
        if results.of(work, OURS) and results.of(work, UNDRAFTED):
            better = ratio(results.better((work, OURS), (work, UNDRAFTED)))
            accepted = percent(results.spread(f"{work}: accepted", OURS))
            same = results.part((f"{work}: the answer", OURS), (f"{work}: the answer", UNDRAFTED))
            agreed = "yes" if same and same.low == same.high == 1 else "no"
            rows.append([work, cell(results, work, OURS), cell(results, work, UNDRAFTED), better, accepted, agreed])
    return markdown(rows)


def goals(results: Results) -> list[str]:
    """Each goal with its measurement, the median over the rounds."""
    eight, one = streams_name(8), streams_name(1)
    found = [
        _goal("8 streams get {} times the tokens of one", results.better((eight, UNDRAFTED), (one, UNDRAFTED)), least=2.5),
        _goal(f"8 streams get {{}} times the tokens of {MLX_LM}'s", results.better((eight, UNDRAFTED), (eight, MLX_LM)), least=10),
        _goal("A stream has {} of its speed during a long prompt", results.part((BESIDE, OURS), (ALONE, OURS)), least=0.7),
        _goal("A warm prefix takes {} of a cold one's time", results.part((WARM, OURS), (COLD, OURS)), most=0.05),
        _goal("A prefix from disk takes {} of a cold one's time", results.part((DISK, OURS), (COLD, OURS)), most=0.15),
        _goal("A conversation's later turns read {} times what they add, at most", _reread(results), most=1.0),
    ]
    for streams in (1, len(STORIES)):
        for kind, least in ((EDIT, 1.5), (FREE, 0.95)):
            name = f"{kind}, {streams_name(streams)}"
            found.append(_goal(f"Drafts, {name}: {{}} times the speed", results.better((name, OURS), (name, UNDRAFTED)), least=least))
    return [line for line in found if line]


def _reread(results: Results) -> Spread | None:
    parts = [results.part((turn_name(turn, "read"), OURS), (turn_name(turn, "new"), OURS)) for turn in turns_found(results)[1:]]
    values = [part.high for part in parts if part]
    return Spread.of([max(values)]) if values else None


def _goal(text: str, found: Spread | None, *, least: float = 0.0, most: float = 0.0) -> str:
    if found is None:
        return ""
    reached = found.middle >= least if least else found.middle <= most
    bound = f"at least {least:g}" if least else f"at most {most:g}"
    return f"{text.format(f'{found.middle:.3g}')} (goal: {bound}): {'reached' if reached else 'not reached'}."


def percent(part: Spread | None) -> str:
    return f"{part.middle:.1%} ({part.low:.1%}–{part.high:.1%})" if part else "–"


def plain(results: Results, work: str, engine: str) -> str:
    found = results.spread(work, engine)
    return number(found.middle) if found else "–"


def _engines(results: Results, work: str) -> list[str]:
    return [engine for engine in SERVERS if results.of(work, engine)]
