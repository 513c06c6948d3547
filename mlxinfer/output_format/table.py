"""Formats by name, for `--tool-format` and for models whose chat template does not show its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .format import HERMES, CallFormat, ReasoningFormat


@dataclass(frozen=True, slots=True)
class Family:
    """Output format of a family of models."""

    calls: CallFormat
    """Spelling that the model is asked for."""
    marks: tuple[str, ...] = ()
    """Texts that identify the family's chat template if its calls cannot be derived; empty for families found by rendering only."""
    first: bool = False
    """True if the table comes before rendering, because the template renders calls differently from the model."""
    also: tuple[CallFormat, ...] = ()
    """Other spellings that the family's models use."""
    reasoning: ReasoningFormat | None = None
    """Literals around reasoning, if they are specific to the family."""
    hidden: tuple[str, ...] = ()
    """Literals around content that do not belong to it."""
    answer: str = ""
    """Literal before an answer without a call."""


def _tagged(begin: str, end: str, **literals: Any) -> CallFormat:
    return CallFormat("tagged", call_begin=begin, call_end=end, **literals)


def _listed(begin: str, end: str, **keys: Any) -> CallFormat:
    """Format of a JSON list of calls."""
    return CallFormat("object", section_begin=begin, section_end=end, separator=", ", **keys)


def _pythonic(begin: str, end: str, separator: str = ", ") -> CallFormat:
    return CallFormat("pythonic", section_begin=begin, section_end=end, separator=separator, name_end="(", call_end=")")


def _dsml(section: str) -> CallFormat:
    """Format of DeepSeek's markup, V3.2 and later."""
    tag = "｜DSML｜"
    return _tagged(
        f'<{tag}invoke name="',
        f"</{tag}invoke>\n",
        section_begin=f"<{tag}{section}>\n",
        section_end=f"</{tag}{section}>",
        name_end='">\n',
        key_begin=f'<{tag}parameter name="',
        key_end='" string="true">',
        key_end_json='" string="false">',
        value_end=f"</{tag}parameter>\n",
    )


def _deepseek(before: str, name_end: str, call_end: str, separator: str) -> CallFormat:
    return CallFormat(
        "json",
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call_begin=f"<｜tool▁call▁begin｜>{before}",
        name_end=name_end,
        call_end=f"{call_end}<｜tool▁call▁end｜>",
        separator=separator,
    )


_QWEN_CODER = _tagged(
    "<tool_call>\n<function=",
    "</function>\n</tool_call>",
    separator="\n",
    name_end=">\n",
    key_begin="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
)
_BARE_CODER = _tagged("<function=", "</function>", name_end=">\n", key_begin="<parameter=", key_end=">\n", value_end="\n</parameter>\n")
_GLM = _tagged(
    "<tool_call>",
    "</tool_call>",
    separator="\n",
    name_end="\n",
    key_begin="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
)
_MINIMAX = _tagged(
    '<invoke name="',
    "</invoke>\n",
    section_begin="<minimax:tool_call>\n",
    section_end="</minimax:tool_call>",
    name_end='">\n',
    key_begin='<parameter name="',
    key_end='">',
    value_end="</parameter>\n",
)
_LLAMA3 = CallFormat("object", arguments_key="parameters", parallel=False)
_MISTRAL_LIST = _listed("[TOOL_CALLS] [", "]")
_MISTRAL = CallFormat("json", call_begin="[TOOL_CALLS]", name_end="[ARGS]")
_KIMI = CallFormat(
    "json",
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>functions.",
    name_end=":{id}<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)
_KIMI_BARE = CallFormat(
    "json", call_begin="<|tool_call_begin|>", name_end=":{id}<|tool_call_argument_begin|>", call_end="<|tool_call_end|>"
)
_HARMONY = CallFormat(
    "json",
    call_begin="<|start|>assistant<|channel|>commentary to=functions.",
    name_end=" <|constrain|>json<|message|>",
    call_end="<|call|>",
    parallel=False,
)
_TO, _COMMENTARY = " to=functions.", "<|channel|>commentary"
_HARMONY_SPELLINGS = tuple(
    CallFormat("json", call_begin=begin, name_end=name_end, call_end="<|call|>", parallel=False)
    for begin, name_end in (
        (f"<|start|>assistant{_COMMENTARY}{_TO}", "<|message|>"),
        (f"<|start|>assistant{_COMMENTARY}{_TO}", " json<|message|>"),
        (f"<|start|>assistant{_TO}", f"{_COMMENTARY} <|constrain|>json<|message|>"),
        (f"<|start|>assistant{_TO}", f"{_COMMENTARY} json<|message|>"),
        (f"<|start|>assistant{_TO}", f"{_COMMENTARY}<|message|>"),
        (f"<|start|>assistant<|channel|>analysis{_TO}", " <|constrain|>json<|message|>"),
        (f"<|start|>assistant<|channel|>analysis{_TO}", "<|message|>"),
    )
)
_HARMONY_CONTENT = tuple(
    f"{start}<|channel|>{channel}<|message|>" for start in ("<|start|>assistant", "") for channel in ("final", "commentary")
)
_GEMMA4 = CallFormat("gemma", call_begin="<|tool_call>call:", call_end="<tool_call|>", quote='<|"|>')
_FUNCTION_GEMMA = CallFormat("gemma", call_begin="<start_function_call>call:", call_end="<end_function_call>", quote="<escape>")
_COHERE = _listed("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>", name_key="tool_name", arguments_key="parameters")

FAMILIES: Mapping[str, Family] = {
    "hermes": Family(HERMES),
    "qwen3-coder": Family(_QWEN_CODER, also=(_BARE_CODER,)),
    "seed-oss": Family(
        _tagged(
            "<seed:tool_call>\n<function=",
            "</function>\n</seed:tool_call>",
            separator="\n",
            name_end=">\n",
            key_begin="<parameter=",
            key_end=">",
            value_end="</parameter>\n",
        )
    ),
    "glm": Family(_GLM),
    "minimax-m2": Family(_MINIMAX),
    "llama3": Family(_LLAMA3, also=(CallFormat("object", call_begin="<|python_tag|>", arguments_key="parameters"),)),
    "llama4": Family(_pythonic("[", "]"), ("<|header_start|>", "<|eot|>"), also=(_LLAMA3,), first=True),
    "pythonic": Family(_pythonic("[", "]")),
    "olmo3": Family(_pythonic("<function_calls>\n", "\n</function_calls>", "\n"), ("<function_calls>", "olmo")),
    "lfm2": Family(_pythonic("<|tool_call_start|>[", "]<|tool_call_end|>"), ("List of tools: ",)),
    "mistral": Family(_MISTRAL, also=(_MISTRAL_LIST,)),
    "mistral-nemo": Family(_MISTRAL_LIST),
    "deepseek-r1": Family(_deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"), ("<｜tool▁calls▁begin｜>", "```json")),
    "deepseek-v3.1": Family(_deepseek("", "<｜tool▁sep｜>", "", ""), ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    "deepseek-v3.2": Family(_dsml("function_calls")),
    "deepseek-v4": Family(_dsml("tool_calls")),
    "kimi-k2": Family(_KIMI, ("<|tool_calls_section_begin|>",), also=(_KIMI_BARE,)),
    "harmony": Family(
        _HARMONY,
        ("<|channel|>analysis<|message|>", "<|start|>assistant"),
        first=True,
        also=_HARMONY_SPELLINGS,
        reasoning=ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
        hidden=(*_HARMONY_CONTENT, "<|start|>assistant<|channel|>analysis<|message|><|end|>", "<|end|>", "<|return|>"),
        answer="<|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma4": Family(_GEMMA4, ("<|tool_call>call:",)),
    "functiongemma": Family(_FUNCTION_GEMMA, ("<start_function_call>", "<escape>")),
    "granite-3": Family(_listed("<|tool_call|>[", "]"), ("<|start_of_role|>", "<|tool_call|>"), also=(HERMES,)),
    "phi4-mini": Family(_listed("<|tool_call|>[", "]<|/tool_call|>"), ("<|tool|>", "<|/tool|>")),
    "cohere": Family(_COHERE, hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "nemotron-v2": Family(_listed("<TOOLCALL>[", "]</TOOLCALL>"), ("<TOOLCALL>",)),
    "smollm3": Family(HERMES, ("xml_tools", "python_tools")),
    "functionary": Family(CallFormat("json", call_begin=">>>", name_end="\n"), hidden=(">>>all\n",), answer=">>>all\n"),
}
"""Families by the names that `--tool-format` accepts."""


def family_of(template: str, *, first: bool) -> Family | None:
    """Return the family whose marks a chat template has, among those with this value of `first`; None if unknown."""
    found = (family for family in FAMILIES.values() if family.marks and family.first == first)
    return next((family for family in found if all(mark in template for mark in family.marks)), None)


_HIDDEN = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")


def hidden_of_template(template: str) -> tuple[str, ...]:
    """Return the literals around content that a chat template mentions."""
    known = (*_HIDDEN, "<|open|>response<|sep|>", "<|close|>response<|sep|>", ">>>all\n")
    if "<|open|>" in template and "response" in template:
        return tuple(literal for literal in known if literal.startswith(("<|open|>", "<|close|>")))
    return tuple(literal for literal in known if literal in template or (literal.startswith(">>>") and ">>>all" in template))
