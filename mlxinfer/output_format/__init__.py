"""What a model writes in a chat: reasoning, content and calls of tools, told apart."""

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
