"""Splits an answer into reasoning, content and calls while it is generated. The result does not depend on how the text is chunked."""

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
"""Reader of each call kind; `NamedCallReader` reads the other kinds."""

_LONGEST_ENTRY = 256
_LONGEST_LINE = 256
"""Characters of a line that are searched for the start of a code block."""
_MOST_SPACE = 256
"""Whitespace characters that are held back at most."""
_ENTRY = re.compile(r', {0,4}"\w{1,32}" {0,4}: {0,4}(?:"[^"\\}\n]{0,160}"|\d{1,16}|null)')
"""Another entry of a call's object, shorter than `_LONGEST_ENTRY`."""


class _Marker:
    """A literal that ends content."""

    def __init__(self, kind: str, text: str, calls: CallFormat | None = None) -> None:
        self.kind = kind
        """One of "reasoning", "call", "bare" and "hidden". A "bare" marker has an empty literal: it matches at the start of a line."""
        self.literal = literal(text.lstrip())
        self.calls = calls
        self.at_start = kind == "call" and len(text.strip()) < 3
        """True for a literal so short that it counts only at the start of an answer."""


def _call_literal(calls: CallFormat, before: str) -> str:
    return before + ("{" if calls.kind == "object" else "")


class OutputReader:
    """Reads one answer from text alone: special tokens that belong to the format must be spelled out in it."""

    def __init__(self, format: OutputFormat, tools: Tools, begun: str = "", *, bare: bool = True, parallel: bool = True) -> None:
        """Create a reader for one answer.

        `tools` are the offered ones: a name outside of them is never a call. `begun` is the end of the rendered prompt, which may have
        opened reasoning. With `bare`, calls as plain JSON are read whatever the format; without `parallel`, at most one of these.
        """
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
        """Last line of the emitted content."""
        self._fenced = False
        """True inside of a code block."""
        self._called = False
        """True after the first call."""
        self._offset = 0
        """Characters of the answer before `_text`."""
        self._plain = 0
        """End of the last failed plain-JSON run: its lines are not tried again as calls."""
        self._start(format, begun)

    def _start(self, format: OutputFormat, begun: str) -> None:
        """Continue from the prompt, which may have opened reasoning or written the start of a marker."""
        tail = begun.rstrip()
        if format.reasoning and tail.endswith(format.reasoning.begin.strip()):
            self._state = self._reasoning_start
            return
        texts = [marker.literal.text for marker in self._markers if marker.kind != "bare"]
        length = max((max(overlap(tail, text), len(text) if tail.endswith(text) else 0) for text in texts), default=0)
        self._text = tail[len(tail) - length :]
        self._own = length

    def add(self, text: str) -> list[OutputEvent]:
        """Add text and return the events that are certain by now."""
        self._text += text
        return self._run(final=False)

    def finish(self) -> list[OutputEvent]:
        """End the answer and return the rest. Text that only looked like a call is returned whole, as content."""
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
        """Emit the text up to `end` as content, without the part that the prompt wrote."""
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
        """Position of the whitespace before `at`. It is held back because a call may follow."""
        return max(len(text[self._at : at].rstrip(" \t\r\n")) + self._at, at - _MOST_SPACE)

    def _line_after(self, text: str) -> tuple[str, bool]:
        """Return (last line of the content, True if it is inside of a code block) after `text` is appended."""
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
        """Return (end, marker) of all markers that match at `at`, longest first; None while a match is undecided."""
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
        """End the content at the first marker. If it does not start a call, the other matches are tried."""
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
        """Skip the whitespace after a marker."""
        return self._skip_space(self._content)

    def _skip_space(self, following: Callable[[bool], bool]) -> bool:
        size = len(self._text)
        self._at = size - len(self._text[self._at :].lstrip(" \t\r\n"))
        if self._at == size:
            return False
        self._state = following
        return True

    def _reasoning_start(self, final: bool) -> bool:
        """Start inside reasoning that the prompt has opened; the model may open it again."""
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
        """Drop a failed call: try the other spellings, or emit its first character as content and read the rest again."""
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
        """Skip entries of a call's object after its arguments, such as an id."""
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
        """Read the end of a call or section, or the start of the next call."""
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
    """Return the markers that end content, and a pattern of their first characters.

    A call may also appear without its `section_begin`.
    """
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
    """Return ("end" or "next", literal) for each combination of literals that may follow the arguments."""
    close = "}" if calls.kind == "object" else ""
    call_end = calls.call_end[1:] if calls.kind == "pythonic" else calls.call_end
    ends = {before + end for before in {"", close} for end in {"", call_end}}
    found = [("end", literal(" " + end)) for end in ends if end]
    found += [("end", literal(" " + end + calls.section_end)) for end in ends if calls.section_end]
    next_call = _call_literal(calls, calls.next)
    if calls.parallel and (next_call.strip() or (calls.section_begin and calls.kind != "object")):
        found += [("next", literal(" " + end + next_call)) for end in ends]
    return found
