"""Tables of results, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..common.report import caption, cell, markdown, number, ratio, versions, warnings
from ..common.samples import Results, Spread
from . import workloads as w
from .texts import STORIES


def document(models: list[Results], about: dict[str, Any]) -> str:
    parts = [f"{caption(about)}\n\n{versions(about)}"]
    for results in models:
        described = about["models"][results.model]
        parts.append(f"## {results.model} ({described['file']})\n\n{_servers(described)}")
        parts += [f"### {title}\n\n{text}" for title, text in sections(results) if text]
        said = [line for line in warnings(described, results) if line]
        if said:
            parts.append("\n".join(f"- {line}" for line in said))
    return "\n\n".join(parts) + "\n"


def _servers(described: dict[str, Any]) -> str:
    found = [f"{engine} {about['version']}" for engine, about in described["engines"].items() if not engine.startswith(w.OURS)]
    return f"Compared with {', '.join(found)}." if found else "This project alone."


def sections(results: Results) -> Iterator[tuple[str, str]]:
    yield "Tokens per second of several streams together", streams_table(results)
    yield "A stream while a long prompt is read", beside_table(results)
    yield "First token after a long prefix", prefix_table(results)
    yield "A conversation: tokens read, and time to the first token", conversation_table(results)
    yield "Drafts from the text itself", drafts_table(results)


def streams_table(results: Results) -> str:
    pairs = [f"mlxinfer / {other}" for other in (w.LLAMA, w.MLX_LM)]
    rows = [["", "mlxinfer", "of one stream", w.LLAMA, w.MLX_LM, *pairs, "deterministic", "its part"]]
    for work in streams_found(results):
        rows.append(
            [
                work,
                cell(results, work, w.UNDRAFTED),
                ratio(results.better((work, w.UNDRAFTED), (w.streams_name(1), w.UNDRAFTED))),
                *(cell(results, work, engine) for engine in (w.LLAMA, w.MLX_LM)),
                *(ratio(results.better((work, w.UNDRAFTED), (work, engine))) for engine in (w.LLAMA, w.MLX_LM)),
                cell(results, work, w.DETERMINISTIC),
                percent(results.part((work, w.DETERMINISTIC), (work, w.UNDRAFTED))),
            ]
        )
    return markdown(rows)


def streams_found(results: Results) -> list[str]:
    return [w.streams_name(n) for n in range(1, 257) if results.of(w.streams_name(n), w.UNDRAFTED)]


def beside_table(results: Results) -> str:
    rows = [["tokens/s", "alone", "beside the prompt", "its part", "first token of the prompt"]]
    for engine in _engines(results, w.ALONE):
        part = percent(results.part((w.BESIDE, engine), (w.ALONE, engine)))
        alone, beside, first = (cell(results, work, engine) for work in (w.ALONE, w.BESIDE, w.FIRST_BESIDE))
        rows.append([engine, alone, beside, part, first])
    return markdown(rows)


def prefix_table(results: Results) -> str:
    rows = [["", "cold", "warm", "part of cold", "tokens read", "from disk, in a new process", "part of cold", "tokens read"]]
    for engine in _engines(results, w.COLD):
        row = [engine, cell(results, w.COLD, engine)]
        for work in (w.WARM, w.DISK):
            part = percent(results.part((work, engine), (w.COLD, engine)))
            row += [cell(results, work, engine), part, plain(results, f"{work}: tokens read", engine)]
        rows.append(row)
    return markdown(rows)


def conversation_table(results: Results) -> str:
    engines = _engines(results, w.turn_name(1, "read"))
    rows = [["turn", *(f"{engine}: {what}" for engine in engines for what in ("new", "read", "first token"))]]
    for turn in turns_found(results):
        row = [str(turn)]
        for engine in engines:
            row += [plain(results, w.turn_name(turn, what), engine) for what in ("new", "read")]
            row.append(cell(results, w.turn_name(turn, "first token"), engine, spread=False))
        rows.append(row)
    return markdown(rows)


def turns_found(results: Results) -> list[int]:
    return [turn for turn in range(1, 100) if w.turn_name(turn, "read") in results.works]


def drafts_table(results: Results) -> str:
    rows = [["tokens/s", "with drafts", "without", "with / without", "drafted tokens accepted", "same answers"]]
    for work in [f"{kind}, {w.streams_name(n)}" for kind in (w.EDIT, w.FREE) for n in (1, len(STORIES))]:
        if results.of(work, w.OURS) and results.of(work, w.UNDRAFTED):
            better = ratio(results.better((work, w.OURS), (work, w.UNDRAFTED)))
            accepted = percent(results.spread(f"{work}: accepted", w.OURS))
            same = results.part((f"{work}: the answer", w.OURS), (f"{work}: the answer", w.UNDRAFTED))
            agreed = "yes" if same and same.low == same.high == 1 else "no"
            rows.append([work, cell(results, work, w.OURS), cell(results, work, w.UNDRAFTED), better, accepted, agreed])
    return markdown(rows)


def percent(part: Spread | None) -> str:
    return f"{part.middle:.1%} ({part.low:.1%}–{part.high:.1%})" if part else "–"


def plain(results: Results, work: str, engine: str) -> str:
    found = results.spread(work, engine)
    return number(found.middle) if found else "–"


def _engines(results: Results, work: str) -> list[str]:
    return [engine for engine in w.SERVERS if results.of(work, engine)]
