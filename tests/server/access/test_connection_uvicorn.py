"""Parts of uvicorn that `server/access/connection.py` uses besides its public interface, the reason for the pin of its minor version in
pyproject.toml.

If this fails after an upgrade, compare uvicorn's `h11_impl.py` with `Connection`. Move the pin only when the tests in test_cancel.py,
test_hostile_requests.py and test_sockets.py pass.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import h11
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from mlxinfer.server.access.connection import Connection

OVERRIDDEN = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "handle_events": ["self"],
    "on_response_complete": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "send_400_response": ["self", "msg"],
    "_should_upgrade": ["self"],
}
"""Methods that uvicorn or asyncio calls, with their arguments."""
ATTRIBUTES = ("app_state", "conn", "connections", "cycle", "flow", "loop", "transport")
"""Attributes of a connection that `Connection` reads or replaces."""


def test_what_is_overridden_exists() -> None:
    assert {name for name in vars(Connection) if name in dir(H11Protocol) and not name.startswith("__")} == set(OVERRIDDEN)
    for name, arguments in OVERRIDDEN.items():
        assert list(inspect.signature(getattr(H11Protocol, name)).parameters) == arguments, name


def test_uvicorn_calls_the_hooks() -> None:
    source = inspect.getsource(H11Protocol)
    assert "self.handle_events()" in inspect.getsource(H11Protocol.data_received)
    assert "self._should_upgrade()" in source
    assert "self.send_400_response(" in source
    assert "on_response=self.on_response_complete" in source


async def nothing(scope: object, receive: object, send: object) -> None:
    """An application."""


def test_the_attributes_that_are_read_exist() -> None:
    loop = asyncio.new_event_loop()
    connection = Connection(Config(nothing, ws="none", lifespan="off"), ServerState(), {}, _loop=loop)
    loop.close()
    assert [name for name in ATTRIBUTES if not hasattr(connection, name)] == []
    assert isinstance(connection.conn, h11.Connection)
    assert hasattr(connection.conn, "trailing_data")
    assert {"disconnected", "message_event", "response_complete"} <= assigned(RequestResponseCycle)
    assert {"read_paused", "resume_reading"} <= {*dir(FlowControl), *assigned(FlowControl)}


def assigned(kind: type) -> set[str]:
    return set(re.findall(r"self\.(\w+)", inspect.getsource(kind)))


def test_the_minor_version_is_pinned() -> None:
    major, minor = version("uvicorn").split(".")[:2]
    written = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"uvicorn>={major}.{minor},<{major}.{int(minor) + 1}"' in written
