"""Tells the parts of an answer apart while it is written. How its text is cut into pieces makes no difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from ..tools import Tools
from .bare_calls import FENCE, FIRST, BareCallsReader
from .call_reader import CallReader, NamedCallReader, ObjectCallReader
from .format import CallFormat, EventKind, OutputEvent, OutputFormat
from .streaming_match import MISS, MORE, Literal, literal, overlap, skip_whitespace
from .tagged_reader import TaggedCallReader

_READERS: dict[str, Callable[..., CallReader]] = {"object": ObjectCallReader, "tagged": TaggedCallReader}
"""By kind; `NamedCallReader` reads the others."""

_LONGEST_ENTRY = 256
_LONGEST_LINE = 256
"""Characters of a line that are looked at to tell where a code block begins."""
_MOST_SPACE = 256
"""Whitespace that is held back."""
_ENTRY = re.compile(r', {0,4}"\w{1,32}" {0,4}: {0,4}(?:"[^"\\}\n]{0,160}"|\d{1,16}|null)')
"""A further entry of a call's object, shorter than `_LONGEST_ENTRY` and without what shows that there is none."""


class _Marker:
    """A literal that ends content."""

    def __init__(self, kind: str, text: str, calls: CallFormat | None = None) -> None:
        self.kind = kind
        """One of "reasoning", "call", "bare" and "hidden". One that is "bare" is empty: it is where a line begins."""
        self.literal = literal(text.lstrip())
        self.calls = calls
        self.at_start = kind == "call" and len(text.strip()) < 3
        """It looks so much like text that it counts only where the answer begins."""


def _call_literal(calls: CallFormat, before: str) -> str:
    return before + ("{" if calls.kind == "object" else "")


class OutputReader:
    """Reads one answer. Pure: it knows no tokens; special tokens that are part of the format must be spelled out in the text."""

    def __init__(self, format: OutputFormat, tools: Tools, begun: str = "", *, bare: bool = True, parallel: bool = True) -> None:
        """`bare`: calls as plain JSON are read too. Without `parallel` only the first of these is."""
        self._tools = tools
        self._parallel = parallel
        self._events: list[OutputEvent] = []
        self._reasoning_end = literal(format.reasoning.end) if format.reasoning else None
        self._reasoning_begin = literal(format.reasoning.begin) if format.reasoning else None
        self._markers, self._first = _markers(format, bool(tools), bare and bool(tools))
        self._state: Callable[[bool], bool] = self._content
        self._text = ""
        self._at = 0
        self._own = 0
        self._held: list[str] = []
        self._call: CallReader | None = None
        self._others: list[tuple[int, _Marker]] = []
        self._fresh = True
        self._line = ""
        """The content's last line, as far as it was emitted."""
        self._fenced = False
        """The content is inside of a code block."""
        self._called = False
        """There was a call."""
        self._offset = 0
        """Characters of the answer before `_text`."""
        self._plain = 0
        """Characters of the answer that are known to be no calls as plain JSON: a failed run is not read again from each of its lines."""
        self._start(format, begun)

    def _start(self, format: OutputFormat, begun: str) -> None:
        """The prompt may have opened reasoning, or written the beginning of a marker."""
        tail = begun.rstrip()
        if format.reasoning and tail.endswith(format.reasoning.begin.strip()):
            self._state = self._reasoning_start
            return
        texts = [marker.literal.text for marker in self._markers if marker.kind != "bare"]
        length = max((max(overlap(tail, text), len(text) if tail.endswith(text) else 0) for text in texts), default=0)
        self._text = tail[len(tail) - length :]
        self._own = length

    def add(self, text: str) -> list[OutputEvent]:
        """Take further text. Returns what is certain by now."""
        self._text += text
        return self._run(final=False)

    def finish(self) -> list[OutputEvent]:
        """The answer has ended: whatever was held back. What only looked like a call comes out as content, whole."""
        events = self._run(final=True)
        rest, self._text, self._at = self._text[self._at :], "", 0
        if self._call is not None and self._call.begun and not self._call.ended:
            self._call.rest(rest)
            events += self._taken()
        return events

    def _run(self, final: bool) -> list[OutputEvent]:
        while self._state(final):
            pass
        if self._at:
            self._offset += self._at
            self._text, self._at = self._text[self._at :], 0
        return self._taken()

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def _emit(self, kind: EventKind, text: str) -> None:
        events = self._events
        if events and events[-1].kind == kind and kind != "call_begin":
            events[-1] = OutputEvent(kind, events[-1].text + text)
        else:
            events.append(OutputEvent(kind, text))
        if kind != "content":
            self._line = ""

    def _write(self, end: int) -> None:
        """Emit the text up to `end` as content, without what the prompt wrote of it."""
        own = min(self._own, end - self._at)
        text = self._text[self._at + own : end]
        self._own -= own
        self._at = end
        if text:
            self._fresh = self._fresh and text.isspace()
            self._line, self._fenced = self._line_after(text)
            self._emit("content", text)

    def _content(self, final: bool) -> bool:
        text, start = self._text, self._at
        found = self._first.search(text, start) if self._first else None
        while found is not None:
            at = found.start()
            matches = self._markers_at(text, at, final)
            if matches != []:
                before = self._before_space(text, at)
                self._write(before)
                if matches is None:
                    return False
                self._enter(matches)
                return True
            assert self._first is not None
            found = self._first.search(text, at + 1)
        self._write(len(text) if final else self._before_space(text, len(text)))
        return False

    def _before_space(self, text: str, at: int) -> int:
        """Where the whitespace before `at` begins: it is held back, for a call may follow."""
        return max(len(text[self._at : at].rstrip(" \t\r\n")) + self._at, at - _MOST_SPACE)

    def _line_after(self, text: str) -> tuple[str, bool]:
        """(the last line of the content, whether it is inside of a code block) once this text is part of it."""
        *lines, last = (self._line + text).split("\n")
        fences = sum(line.lstrip().startswith(FENCE) and "`" not in line.lstrip().lstrip("`") for line in lines)
        return last[:_LONGEST_LINE], self._fenced ^ bool(fences % 2)

    def _bare_at(self, text: str, at: int) -> bool:
        """Return True if a call as plain JSON may start here: at the start of a line, outside of code blocks."""
        before = text[self._at : at]
        if not (self._fresh and not before.strip()):
            _, newline, line = before.rpartition("\n")
            line = line if newline else self._line + line
            if line.strip(" \t") if text[at] == FENCE[0] else line:
                return False
        return not self._line_after(before)[1]

    def _markers_at(self, text: str, at: int, final: bool) -> list[tuple[int, _Marker]] | None:
        """The markers at this place with where they end, longest first; None while one is open."""
        found = []
        for marker in self._markers:
            if marker.at_start and not (self._fresh and not text[self._at : at].strip()):
                continue
            if marker.kind == "bare" and (text[at] not in FIRST or self._offset + at < self._plain or not self._bare_at(text, at)):
                continue
            end = marker.literal.match(text, at, final)
            if end == MORE:
                return None
            if end != MISS:
                found.append((end, marker))
        return sorted(found, key=lambda match: -match[0]) if len(found) > 1 else found

    def _enter(self, matches: list[tuple[int, _Marker]]) -> None:
        """Content ends at a marker. Where several match, the others are tried if the first one's call is none."""
        end, marker = matches[0]
        if marker.calls is not None:
            self._others = [(other_end - self._at, other) for other_end, other in matches[1:]]
            self._enter_call(marker.calls, end, bare=marker.kind == "bare")
            return
        self._own = max(0, self._own - (end - self._at))
        self._at = end
        self._fresh = True
        self._state = self._reasoning_space if marker.kind == "reasoning" else self._space

    def _enter_call(self, calls: CallFormat, end: int, *, bare: bool = False) -> None:
        self._held = [self._text[self._at : end]]
        self._at = end
        if bare:
            most = None if self._parallel else int(not self._called)
            self._call = BareCallsReader(calls, self._tools, self._emit, most)
        else:
            reader = _READERS.get(calls.kind, NamedCallReader)
            self._call = reader(calls, self._tools, self._emit)
        self._state = self._in_call

    def _space(self, final: bool) -> bool:
        """Whitespace after a marker is none of the answer's."""
        return self._skip_space(self._content)

    def _skip_space(self, following: Callable[[bool], bool]) -> bool:
        size = len(self._text)
        self._at = size - len(self._text[self._at :].lstrip(" \t\r\n"))
        if self._at == size:
            return False
        self._state = following
        return True

    def _reasoning_start(self, final: bool) -> bool:
        """The prompt has opened reasoning, and models may do so once more."""
        return self._skip_space(self._reasoning_begin_again)

    def _reasoning_begin_again(self, final: bool) -> bool:
        assert self._reasoning_begin is not None
        end = self._reasoning_begin.match(self._text, self._at, final)
        if end == MORE:
            return False
        self._at = max(self._at, end)
        self._state = self._reasoning_space
        return True

    def _reasoning_space(self, final: bool) -> bool:
        return self._skip_space(self._reasoning)

    def _reasoning(self, final: bool) -> bool:
        assert self._reasoning_end is not None
        text = self._text
        at, end = self._reasoning_end.find(text, self._at, final)
        before = at if end == MISS and final else self._before_space(text, at)
        if before > self._at:
            self._emit("reasoning", text[self._at : before])
            self._at = before
        if end < 0:
            return False
        self._at, self._fresh, self._state = end, True, self._space
        return True

    def _in_call(self, final: bool) -> bool:
        call, start = self._call, self._at
        assert call is not None
        self._at = call.read(self._text, start, final)
        if not call.begun:
            self._held.append(self._text[start : self._at])
            if not call.failed and not final:
                return False
            self._no_call()
            return True
        self._held, self._own, self._fresh, self._called = [], 0, False, True
        if call.failed:
            self._call, self._state = None, self._content
        elif call.ended and isinstance(call, BareCallsReader):
            self._call, self._state = None, self._space
        elif call.ended:
            self._state = self._object_rest if call.calls.kind == "object" else self._after_call
        return call.failed or call.ended

    def _no_call(self) -> None:
        """What looked like a call is one of another spelling, or text: its first character is, and the rest is looked at again."""
        held = "".join(self._held)
        if isinstance(self._call, BareCallsReader):
            self._plain = self._offset + self._at
        self._offset += self._at - len(held)
        self._text = held + self._text[self._at :]
        self._at, self._held, self._call, self._state = 0, [], None, self._content
        if self._others:
            others, self._others = self._others, []
            self._enter(others)
            return
        self._write(skip_whitespace(self._text, 0) + 1)

    def _object_rest(self, final: bool) -> bool:
        """What a call's object has after its arguments, such as an id."""
        at = skip_whitespace(self._text, self._at)
        rest = self._text[at : at + _LONGEST_ENTRY]
        entry = _ENTRY.match(rest)
        if entry is not None and (entry.end() < len(rest) or final):
            self._at = at + entry.end()
            return True
        if not final and (not rest or (rest[0] == "," and len(rest) < _LONGEST_ENTRY and not re.search(r"[}\n]", rest))):
            return False
        self._state = self._after_call
        return True

    def _after_call(self, final: bool) -> bool:
        """What ends a call, a section, or leads to the next call."""
        assert self._call is not None
        calls, text, best, ended = self._call.calls, self._text, (MISS, ""), self._at
        for kind, ending in _endings(calls):
            end = ending.match(text, self._at, final)
            if end == MORE:
                return False
            if end > best[0]:
                best = end, kind
            if kind == "end":
                ended = max(ended, end)
        end, kind = best
        self._call = None
        if kind == "next":
            self._others, self._at = [], skip_whitespace(text, ended)
            self._enter_call(calls, end)
            return True
        self._at = max(self._at, end)
        self._state = self._space
        return True


@lru_cache(64)
def _markers(format: OutputFormat, with_tools: bool, bare: bool) -> tuple[tuple[_Marker, ...], re.Pattern[str] | None]:
    """What to look for in content, and what finds a first letter of it. The call of a section may come without what begins the section."""
    markers = [_Marker("hidden", text) for text in format.hidden]
    if format.reasoning:
        markers.append(_Marker("reasoning", format.reasoning.begin))
    for calls in filter(None, (format.calls, *format.also)) if with_tools else ():
        begins = {calls.begin, calls.call_begin if len(calls.call_begin.strip()) > 2 else calls.begin}
        markers += [_Marker("call", _call_literal(calls, begin), calls) for begin in sorted(begins)]
    markers = [marker for marker in markers if marker.literal.text]
    first = "".join(sorted({re.escape(letter) for letter in {*(marker.literal.text[0] for marker in markers), *(FIRST if bare else "")}}))
    if bare:
        own = [CallFormat("object", name_key=calls.name_key, arguments_key=calls.arguments_key) for calls in filter(None, (format.calls,))]
        markers += [_Marker("bare", "", calls) for calls in dict.fromkeys((CallFormat("object"), *own))]
    return tuple(markers), re.compile(f"[{first}]") if first else None


@lru_cache(64)
def _endings(calls: CallFormat) -> list[tuple[str, Literal]]:
    """What may follow the arguments, in every combination that is understood."""
    close = "}" if calls.kind == "object" else ""
    call_end = calls.call_end[1:] if calls.kind == "pythonic" else calls.call_end
    ends = {before + end for before in {"", close} for end in {"", call_end}}
    found = [("end", literal(" " + end)) for end in ends if end]
    found += [("end", literal(" " + end + calls.section_end)) for end in ends if calls.section_end]
    next_call = _call_literal(calls, calls.next)
    if calls.parallel and (next_call.strip() or (calls.section_begin and calls.kind != "object")):
        found += [("next", literal(" " + end + next_call)) for end in ends]
    return found
