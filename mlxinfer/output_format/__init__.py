"""Formats of chat answers: detection, reading and rendering of reasoning, content and tool calls."""

from .detect import output_format
from .format import CallFormat, OutputEvent, OutputFormat, ReasoningFormat
from .history import messages_for_template
from .reader import OutputReader

__all__ = [
    "CallFormat",
    "OutputEvent",
    "OutputFormat",
    "OutputReader",
    "ReasoningFormat",
    "messages_for_template",
    "output_format",
]
