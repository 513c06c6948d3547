"""A source of pages that turns itself off is asked by other threads meanwhile."""

from __future__ import annotations

from time import monotonic

from mlxinfer.cache.disk.backend import PageSource


class Watched(PageSource):
    """Keeps how long after a note's appearance it is not tried again, and what users are told."""

    def __init__(self) -> None:
        self.left: list[float] = []
        self.lines: list[str] = []
        self._text = ""
        super().__init__("test", self.lines.append)

    @property
    def note(self) -> str:  # type: ignore[override]
        return self._text

    @note.setter
    def note(self, text: str) -> None:
        self._text = text
        if text:
            self.left.append(self._retry_at - monotonic())


def test_whoever_sees_the_note_sees_when_to_try_again() -> None:
    source = Watched()
    source._turn_off("it is off", 60.0)
    assert min(source.left) > 30
    source.close()


def test_the_first_reason_stays_and_each_is_told_once() -> None:
    source = Watched()
    source._turn_off("no such file", 60.0)
    source._turn_off("not a directory", 60.0)  # of the other thread, which was at work too
    assert (source.note, source.lines) == ("no such file", ["no such file"])
    source.note = ""  # it is tried again
    source._turn_off("no such file", 60.0)
    assert source.lines == ["no such file"]
    source.note = ""
    source._turn_off("not a directory", 60.0)
    assert source.lines == ["no such file", "not a directory"]
    source.close()
    source.note = ""
    source._turn_off("closed", 60.0)
    assert source.lines[-1] == "not a directory"
