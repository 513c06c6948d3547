"""Requests generated from the server's OpenAPI document: the answers match the document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import tiny_directory
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM

schemathesis = needs("schemathesis")
CHECKS = ("status_code_conformance", "content_type_conformance", "response_schema_conformance", "negative_data_rejection")
"""Checks of each answer: it matches the document and is not a server error."""
PACE = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a short context, so that no answer takes long."""
    path = tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, context=128)
    with live_server({"tiny": lambda: AsyncLLM(path)}) as server:
        yield server


@pytest.fixture(scope="module")
def api(small: LiveServer) -> Any:
    document = json.loads(small.exchange(request("/openapi.json", method="GET"))[2])
    found = schemathesis.openapi.from_dict(document)
    # The body of a request may also be too long, and its model unknown.
    found.config.checks.negative_data_rejection.expected_statuses = ["400", "404", "413"]
    return found


def conforms(live: LiveServer, api: Any, examples: int) -> None:
    documented = import_module("schemathesis.specs.openapi.checks")
    checks = (schemathesis.checks.not_a_server_error, *(getattr(documented, name) for name in CHECKS))
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) >= 8
    for operation, mode in product(operations, schemathesis.GenerationMode):
        if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue  # no request can be wrong
        if operation.path == "/models/sse":
            continue  # the stream never ends

        @settings(max_examples=examples, **PACE)
        @given(operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            # Otherwise hardly any request would have a valid model name.
            if isinstance(case.body, dict) and isinstance(name := case.body.get("model"), str) and len(name) <= 256:
                case.body["model"] = "tiny"
            case.call_and_validate(base_url=live.url, checks=checks, timeout=120)

        ask()
    stats = live.until(lambda s: s.running == s.waiting == s.pages_used == 0)
    assert stats.restarts == 0


@pytest.mark.long
def test_answers_are_as_documented(small: LiveServer, api: Any) -> None:
    conforms(small, api, 3)


@pytest.mark.slow
def test_many_answers_are_as_documented(small: LiveServer, api: Any) -> None:
    conforms(small, api, 150)
