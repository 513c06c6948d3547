"""Chat templates written for tests, one for each call format."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """A chat template, and what is to be found out of it."""

    template: str
    """Its Jinja source."""
    kind: str
    """The kind of its calls."""
    reasoning: str = ""
    """Literal that opens reasoning."""
    exact: bool = True
    """True if every value can be read back."""


def _chat(calls: str, prompt: str = "", before: str = "") -> str:
    """A template whose answers have `calls` after their content; `prompt` ends its generation prompt, `before` stands before content."""
    return (
        "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}{{- '" + before + "' + (m.content or '') }}"
        "{%- if m.tool_calls %}" + calls + "{%- endif %}{%- else %}{{- m.content }}{%- endif %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n" + prompt + "' }}{%- endif %}"
    )


def _each(call: str, begin: str = "", end: str = "", separator: str = "") -> str:
    """Every call `c` (its function), between `begin` and `end`."""
    each = "{%- for t in m.tool_calls %}{%- set c = t.function %}" + call
    between = "{%- if not loop.last %}{{- '" + separator + "' }}{%- endif %}{%- endfor %}"
    return "{{- '" + begin + "' }}" + each + between + "{{- '" + end + "' }}"


def _object(begin: str, end: str, name: str = "name", arguments: str = "arguments") -> str:
    keys = f'{{- \'{begin}{{"{name}": "\' + c.name + \'", "{arguments}": \''
    return "{" + keys + " + (c.arguments | tojson) + '}" + end + "' }}"


def _named(begin: str, name_end: str, end: str) -> str:
    return "{{- '" + begin + "' + c.name + '" + name_end + "' + (c.arguments | tojson) + '" + end + "' }}"


def _tagged(begin: str, name_end: str, key: str, end: str) -> str:
    """`key` writes the argument `k` with the value `v` (text) of the JSON type `kind`."""
    value = "{%- if v is string %}{%- set text = v %}{%- else %}{%- set text = v | tojson %}{%- endif %}"
    arguments = "{%- for k, v in c.arguments.items() %}" + value + key + "{%- endfor %}"
    return "{{- '" + begin + "' + c.name + '" + name_end + "' }}" + arguments + "{{- '" + end + "' }}"


def _key(begin: str, end: str, value_end: str) -> str:
    return "{{- '" + begin + "' + k + '" + end + "' + text + '" + value_end + "' }}"


_HERMES = _each(_object("\n<tool_call>\n", "\n</tool_call>"))
_CODER = _each(_tagged("\n<tool_call>\n<function=", ">\n", _key("<parameter=", ">\n", "\n</parameter>\n"), "</function>\n</tool_call>"))
_GEMMA = (
    "{%- macro w(v) %}{%- if v is string %}{{- Q + v + Q }}{%- elif v is mapping %}{{- '{' }}{%- for k in v %}{{- k + ':' }}{{- w(v[k]) }}"
    "{%- if not loop.last %},{% endif %}{%- endfor %}{{- '}' }}{%- elif v is sequence %}{{- '[' }}{%- for i in v %}{{- w(i) }}"
    "{%- if not loop.last %},{% endif %}{%- endfor %}{{- ']' }}{%- else %}{{- v | tojson }}{%- endif %}{%- endmacro %}"
)
_PYTHON = (
    "{%- macro py(v) %}{%- if v is string %}{{- v | tojson }}{%- elif v is none %}None{%- elif v is boolean %}{{- v | string }}"
    "{%- elif v is mapping %}{{- '{' }}{%- for k in v %}{{- k | tojson }}: {{ py(v[k]) }}{%- if not loop.last %}, {% endif %}{%- endfor %}"
    "{{- '}' }}{%- elif v is sequence %}{{- '[' }}{%- for i in v %}{{- py(i) }}{%- if not loop.last %}, {% endif %}{%- endfor %}{{- ']' }}"
    "{%- else %}{{- v }}{%- endif %}{%- endmacro %}"
)
_KEYWORDS = (
    "{{- c.name + '(' }}{%- for k, v in c.arguments.items() %}{{- k }}={{ py(v) }}{%- if not loop.last %}, {% endif %}{%- endfor %})"
)
_DSML = (
    "{%- if v is string %}{%- set s = 'true' %}{%- else %}{%- set s = 'false' %}{%- endif %}"
    "{{- '<｜DSML｜parameter name=\"' + k + '\" string=\"' + s + '\">' + text + '</｜DSML｜parameter>\n' }}"
)
_K3 = (
    "{%- if v is string %}{%- set s = 'string' %}{%- elif v is mapping %}{%- set s = 'object' %}{%- elif v is boolean %}"
    "{%- set s = 'boolean' %}{%- elif v is number %}{%- set s = 'number' %}{%- else %}{%- set s = 'array' %}{%- endif %}"
    "{{- '<|open|>argument key=\"' + k + '\" type=\"' + s + '\"<|sep|>' + text + '<|close|>argument<|sep|>' }}"
)
_CDATA = (
    "{%- if v is string and '<' in v %}{{- '<param name=\"' + k + '\"><![CDATA[' + v + ']]></param>' }}{%- else %}"
    "{{- '<param name=\"' + k + '\">' + text + '</param>' }}{%- endif %}"
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI_NAME = (
    "{{- '<|tool_call_begin|>functions.' + c.name + ':' ~ loop.index0 ~ '<|tool_call_argument_begin|>' + (c.arguments | tojson)"
    " + '<|tool_call_end|>' }}"
)
_ID = "{{- '[TOOL_CALLS]' + c.name + '[CALL_ID]' + t.id + '[ARGS]' + (c.arguments | tojson) }}"
_LIST = _object("", "")

SHAPES: dict[str, Shape] = {
    "qwen2.5": Shape(_chat(_HERMES), "object"),
    "qwen3": Shape(_chat(_HERMES, before="<think>\n\n</think>\n\n"), "object", "<think>"),
    "qwq": Shape(_chat(_HERMES, prompt="<think>\n"), "object", "<think>"),
    "granite-4": Shape(_chat(_each(_object("<tool_call>\n", "\n</tool_call>"), separator="\n")), "object"),
    "minimax-m1": Shape(_chat(_each(_LIST, "<tool_calls>\n", "\n</tool_calls>", "\n")), "object"),
    "apriel": Shape(_chat(_each(_LIST, "<tool_calls>[", "]</tool_calls>", ", ")), "object"),
    "nemotron-v2": Shape(_chat(_each(_LIST, "<TOOLCALL>[", "]</TOOLCALL>", ", "), prompt="<think>\n"), "object", "<think>"),
    "mistral-nemo": Shape(_chat(_each(_object("", "").replace("'}", '\', "id": "\' + t.id + \'"}'), "[TOOL_CALLS][", "]", ", ")), "object"),
    "llama3": Shape(_chat(_each(_object("", "", arguments="parameters"))), "object"),
    "cohere": Shape(
        _chat(
            _each(_object("", "", "tool_name", "parameters"), "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>", ",\n    "),
            prompt="<|START_THINKING|>",
        ),
        "object",
        "<|START_THINKING|>",
    ),
    "gigachat": Shape(_chat(_each(_object("<|function_call|>", ""))), "object"),
    "apertus": Shape(_chat(_each(_named('{"', '": ', "}"), "<|tools_prefix|>[", "]<|tools_suffix|>", ", ")), "json"),
    "mistral": Shape(_chat(_each(_named("[TOOL_CALLS]", "[ARGS]", ""))), "json"),
    "mistral-ids": Shape(_chat(_each(_ID)), "json"),
    "magistral": Shape(_chat(_each(_named("[TOOL_CALLS]", "[ARGS]", "")), before="[THINK][/THINK]"), "json", "[THINK]"),
    "deepseek-r1": Shape(
        _chat(
            _each(
                _named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"), *_DEEPSEEK, separator="\n"
            )
        ),
        "json",
    ),
    "deepseek-v3.1": Shape(
        _chat(_each(_named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), *_DEEPSEEK), prompt="</think>"),
        "json",
        "<think>",
    ),
    "kimi-k2": Shape(_chat(_each(_KIMI_NAME, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")), "json"),
    "functionary": Shape(_chat(_each(_named("<function=", ">", "</function>"))), "json"),
    "qwen3-coder": Shape(_chat(_CODER), "tagged"),
    "qwen3.5": Shape(_chat(_CODER, prompt="<think>\n\n</think>\n\n"), "tagged", "<think>"),
    "seed-oss": Shape(
        _chat(
            _each(
                _tagged(
                    "\n<seed:tool_call>\n<function=", ">\n", _key("<parameter=", ">", "</parameter>\n"), "</function>\n</seed:tool_call>"
                )
            ),
            prompt="<seed:think>",
        ),
        "tagged",
        "<seed:think>",
    ),
    "glm-4.6": Shape(
        _chat(
            _each(_tagged("\n<tool_call>", "\n", _key("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), "</tool_call>")),
            before="<think></think>",
        ),
        "tagged",
        "<think>",
    ),
    "glm-4.7": Shape(
        _chat(
            _each(_tagged("<tool_call>", "", _key("<arg_key>", "</arg_key><arg_value>", "</arg_value>"), "</tool_call>")), prompt="<think>"
        ),
        "tagged",
        "<think>",
    ),
    "minimax-m2": Shape(
        _chat(
            _each(
                _tagged('<invoke name="', '">\n', _key('<parameter name="', '">', "</parameter>\n"), "</invoke>"),
                "\n<minimax:tool_call>\n",
                "\n</minimax:tool_call>",
                "\n",
            ),
            prompt="<think>\n",
        ),
        "tagged",
        "<think>",
    ),
    "deepseek-v3.2": Shape(
        _chat(
            _each(
                _tagged('<｜DSML｜invoke name="', '">\n', _DSML, "</｜DSML｜invoke>\n"),
                "\n\n<｜DSML｜function_calls>\n",
                "</｜DSML｜function_calls>",
            )
        ),
        "tagged",
    ),
    "kimi-k3": Shape(
        _chat(
            _each(
                _tagged('<|open|>call tool="', '" index="1"<|sep|>', _K3, "<|close|>call<|sep|>"),
                "<|open|>tools<|sep|>",
                "<|close|>tools<|sep|>",
            )
        ),
        "tagged",
    ),
    "minicpm5": Shape(_chat(_each(_tagged('<function name="', '">', _CDATA, "</function>"), separator="\n")), "tagged"),
    "gemma4": Shape(
        "{%- set Q = '<|\"|>' %}"
        + _GEMMA
        + _chat(_each("{{- '<|tool_call>call:' + c.name }}{{ w(c.arguments) }}<tool_call|>"), prompt="<|channel>thought\n<channel|>"),
        "gemma",
        "<|channel>thought",
    ),
    "functiongemma": Shape(
        "{%- set Q = '<escape>' %}"
        + _GEMMA
        + _chat(_each("{{- '<start_function_call>call:' + c.name }}{{ w(c.arguments) }}<end_function_call>")),
        "gemma",
    ),
    "lfm2.5": Shape(_PYTHON + _chat(_each(_KEYWORDS, "<|tool_call_start|>[", "]<|tool_call_end|>", ", ")), "pythonic"),
    "pythonic": Shape(_PYTHON + _chat(_each(_KEYWORDS, "[", "]", ", ")), "pythonic"),
    "olmo3": Shape(_PYTHON + _chat(_each(_KEYWORDS, "<function_calls>\n", "\n</function_calls>", "\n")), "pythonic"),
}
"""The forms by the family that is known for them."""

NO_TOOLS = _chat("").replace("{%- if tools %}", "{%- if false %}")
"""A template that knows no tools."""
