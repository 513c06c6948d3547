"""Fields without effect are accepted and logged once; one error names all faults of a request."""

from __future__ import annotations

import json
import logging
import runpy
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from mlxinfer.server import log
from mlxinfer.server.errors import APIError, from_validation_error
from mlxinfer.server.validation import Ignored, StrictModel, Unsupported


class Inner(StrictModel):
    summary: Annotated[str, Ignored("it is not summed up", within="inner")] | None = None


class Body(StrictModel):
    one: Annotated[Any, Ignored("nothing is kept")] = None
    several: Annotated[list[str], Ignored("they mean nothing here")] | None = None
    inner: Inner | None = None
    tools: Annotated[Any, Unsupported([])] = None
    number: int = 0


def faults_of(**body: Any) -> APIError:
    with pytest.raises(ValidationError) as raised:
        Body.model_validate_json(json.dumps(body))
    return from_validation_error(raised.value)


def test_what_is_taken_is_told_by_its_whole_name() -> None:
    taken: dict[str, str] = {}
    Body.model_validate_json(json.dumps({"one": 1, "several": ["a"], "inner": {"summary": "auto"}}), context=taken)
    assert taken == {"one": "nothing is kept", "several": "they mean nothing here", "inner.summary": "it is not summed up"}


@pytest.mark.parametrize("empty", [None, False, "", [], {}])
def test_what_is_empty_is_not_worth_a_note(empty: Any) -> None:
    taken: dict[str, str] = {}
    Body.model_validate_json(json.dumps({"one": empty}), context=taken)
    assert not taken


def test_types_of_ignored_fields_are_still_checked() -> None:
    assert faults_of(several="a").param == "several"


def test_all_faults_are_named_and_the_first_is_the_parameter() -> None:
    error = faults_of(tools=[1], number="x", nonsense=2, one=3)
    assert (error.param, error.code, error.status) == ("tools", "unsupported_parameter", 400)
    assert error.message == "tools: not supported yet; number: Input should be a valid integer; Unknown field: nonsense"


def test_faults_without_end_are_counted() -> None:
    message = faults_of(**{f"unknown_{number}": 1 for number in range(50)}).message
    assert message.count("Unknown field") == 20
    assert message.endswith("; and 30 more")


def test_a_notice_is_written_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(log, "_NOTICED", set())
    monkeypatch.setattr(logging.getLogger("mlxinfer"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("mlxinfer"), "handlers", [])  # earlier tests may have left some
    with caplog.at_level(logging.INFO, "mlxinfer"):
        for _ in range(3):
            log.notice_once("store is taken without effect: nothing is kept", route="/v1/responses")
        log.notice_once("another")
    assert caplog.messages == ["store is taken without effect: nothing is kept", "another"]


def test_the_page_of_the_guide_is_what_the_types_say() -> None:
    docs = Path(__file__).parents[3] / "docs"
    written = (docs / "request-fields.md").read_text(encoding="utf-8")
    page = runpy.run_path(str(docs / "site" / "request_fields.py"))["page"]
    assert written == page(), "python docs/site/request_fields.py > docs/request-fields.md"
    for row in ("| `cache_prompt` | OpenAI's API |", "| `options.num_gpu` |", "| `input[].phase` |"):
        assert row in written
