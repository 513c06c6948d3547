"""Chat template for models with `tekken.json` alone: Mistral's instruct formats in the versions of mistral_common.

Consecutive messages of one role are joined. From v7 the system prompt keeps its position; before, it starts the last user message. Tools
precede the last user message, from v13 the first. SYSTEM_PROMPT.txt is not applied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

_VERSIONS = (3, 7, 11, 13, 15)
_FEATURE = re.compile(r"\s*@(?P<low>\d+)-(?P<high>\d+)(?P<thinks>[+-]?) ")
"""Prefix of a line: its versions, and + or - for templates with or without reasoning."""

# Line breaks are removed; only {{ }} produces output.
_TEMPLATE = r"""
{%- set joint = '\n\n' %}
@3-13 {%- set chunk_joint = '\n\n' %}
@15-15 {%- set chunk_joint = '' %}
{%- macro text_of(content) %}
  {%- set all = namespace(text='') %}
  {%- for part in ([{'type': 'text', 'text': content}] if content is string else content or []) %}
    {%- if part.type not in ('text', 'input_text', 'output_text') %}
      {{- raise_exception('a message has a part of the type ' ~ part.type ~ ', which this chat template does not take') }}
    {%- endif %}
    {%- if part.text %}{%- set all.text = all.text ~ (chunk_joint if all.text else '') ~ part.text %}{%- endif %}
  {%- endfor %}
  {{- all.text }}
{%- endmacro %}
@13-15+ {%- macro thought_of(text, closed=true) %}
@13-15+   {{- '[THINK]' ~ text ~ ('[/THINK]' if closed else '') }}
@13-15+ {%- endmacro %}
@3-11 {%- macro checked(id) %}
@3-11   {%- if not id or id|length != 9 %}
@3-11     {{- raise_exception('the id of a call must be nine letters and digits') }}
@3-11   {%- endif %}
@3-11   {{- id }}
@3-11 {%- endmacro %}
{%- macro arguments_of(call) %}
  {%- set given = call.function.arguments %}
  {{- (given or '{}') if given is string else given|tojson }}
{%- endmacro %}
{%- macro write_calls(calls) %}
@3-7   {%- if calls %}
@3-7     {{- '[TOOL_CALLS][' }}
@3-7   {%- endif %}
  {%- for call in calls %}
@3-7     {{- '{"name": ' ~ call.function.name|tojson ~ ', "arguments": ' ~ arguments_of(call) }}
@3-7     {{- ', "id": ' ~ checked(call.id)|tojson ~ ('}]' if loop.last else '}, ') }}
@11-11     {{- '[TOOL_CALLS]' ~ call.function.name ~ '[CALL_ID]' ~ checked(call.id) ~ '[ARGS]' ~ arguments_of(call) }}
@13-15     {{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ arguments_of(call) }}
  {%- endfor %}
{%- endmacro %}
{%- macro write_result(message) %}
  {%- set content = text_of(message.content) %}
@3-3   {%- set content = content if content[:1] in ('{', '[') else content|tojson %}
@3-3   {{- '[TOOL_RESULTS]{"content": ' ~ content ~ ', "call_id": ' ~ checked(message.tool_call_id)|tojson ~ '}[/TOOL_RESULTS]' }}
@7-11   {{- '[TOOL_RESULTS]' ~ checked(message.tool_call_id) ~ '[TOOL_CONTENT]' ~ content ~ '[/TOOL_RESULTS]' }}
@13-15   {{- '[TOOL_RESULTS]' ~ content ~ '[/TOOL_RESULTS]' }}
{%- endmacro %}
{%- macro write_tools() %}
  {%- for tool in tools or [] %}
    {{- '[AVAILABLE_TOOLS][' if loop.first else ', ' }}
    {%- set function = tool.function %}
    {{- '{"type": "function", "function": {"name": ' ~ function.name|tojson }}
    {{- ', "description": ' ~ (function.description or '')|tojson }}
    {{- ', "parameters": ' ~ (function.parameters or {})|tojson ~ '}}' ~ ('][/AVAILABLE_TOOLS]' if loop.last else '') }}
  {%- endfor %}
{%- endmacro %}
{%- set ns = namespace(role='', first=-1, last=-1, system='', text='', done='', calls=[], results=[], going=true) %}
{%- for message in messages %}
  {%- if message.role == 'user' and ns.role != 'user' %}
    {%- set ns.first = loop.index0 if ns.first < 0 else ns.first %}
    {%- set ns.last = loop.index0 %}
@3-3   {%- elif message.role in ('system', 'developer') and text_of(message.content) %}
@3-3     {%- set ns.system = ns.system ~ text_of(message.content) ~ joint %}
  {%- endif %}
  {%- set ns.role = message.role %}
{%- endfor %}
{{- '<s>' }}
{%- for message in messages %}
  {%- set before = '' if loop.first else loop.previtem.role %}
  {%- set after = '' if loop.last else loop.nextitem.role %}
  {%- if message.role == 'user' %}
    {%- if before != 'user' %}
@3-11       {%- if loop.index0 == ns.last %}
@13-15       {%- if loop.index0 == ns.first %}
        {{- write_tools() }}
@15-15         {{- settings }}
      {%- endif %}
      {{- '[INST]' }}
@3-3       {{- ns.system if loop.index0 == ns.last else '' }}
      {%- set ns.text = '' %}
    {%- endif %}
    {%- set text = text_of(message.content) %}
    {%- set ns.text = ns.text ~ (joint if ns.text and text else '') ~ text %}
    {%- if after != 'user' %}
      {{- ns.text ~ '[/INST]' }}
    {%- endif %}
  {%- elif message.role in ('system', 'developer') %}
@7-15-     {{- '[SYSTEM_PROMPT]' ~ text_of(message.content) ~ '[/SYSTEM_PROMPT]' }}
@13-15+     {{- '[SYSTEM_PROMPT]' }}
@13-15+     {%- for part in ([{'type': 'text', 'text': message.content}] if message.content is string else message.content or []) %}
@13-15+       {%- if part.type == 'thinking' %}
@13-15+         {{- thought_of(text_of(part.thinking), part.closed is not false) }}
@13-15+       {%- else %}
@13-15+         {{- (chunk_joint if part.text and not loop.first and loop.previtem.text else '') ~ text_of([part]) }}
@13-15+       {%- endif %}
@13-15+     {%- endfor %}
@13-15+     {{- '[/SYSTEM_PROMPT]' }}
  {%- elif message.role == 'assistant' %}
    {%- if before != 'assistant' %}
      {%- set ns.text = '' %}
      {%- set ns.done = '' %}
      {%- set ns.calls = [] %}
    {%- endif %}
@13-15+     {%- set thought = message.reasoning_content or message.reasoning %}
@13-15+     {%- if thought is string and thought %}
@13-15+       {%- set ns.done = ns.done ~ ns.text ~ thought_of(thought) %}
@13-15+       {%- set ns.text = '' %}
@13-15+     {%- endif %}
    {%- set here = namespace(joint=joint) %}
    {%- for part in ([{'type': 'text', 'text': message.content}] if message.content is string else message.content or []) %}
@13-15+       {%- if part.type == 'thinking' %}
@13-15+         {%- set ns.done = ns.done ~ ns.text ~ thought_of(text_of(part.thinking), part.closed is not false) %}
@13-15+         {%- set ns.text = '' %}
@13-15+       {%- else %}
      {%- set text = text_of([part]) %}
      {%- if text %}
        {%- set ns.text = ns.text ~ (here.joint if ns.text else '') ~ text %}
        {%- set here.joint = chunk_joint %}
      {%- endif %}
@13-15+       {%- endif %}
    {%- endfor %}
    {%- set ns.calls = ns.calls + (message.tool_calls or []) %}
    {%- if after != 'assistant' %}
      {{- ns.done ~ ns.text if ns.done else ns.text.rstrip(' ') }}
      {{- write_calls(ns.calls) ~ '</s>' }}
    {%- endif %}
  {%- elif message.role == 'tool' %}
@3-7     {{- write_result(message) }}
@11-15     {%- set ns.results = ns.results + [message] %}
@11-15     {%- if after != 'tool' %}
@11-15       {%- for call in ns.calls %}
@11-15         {%- for result in ns.results if result.tool_call_id == call.id %}
@11-15           {{- write_result(result) }}
@11-15         {%- endfor %}
@11-15       {%- endfor %}
@11-15       {%- set ids = ns.calls|map(attribute='id')|list %}
@11-15       {%- for result in ns.results if result.tool_call_id not in ids %}
@11-15         {{- write_result(result) }}
@11-15       {%- endfor %}
@11-15       {%- set ns.results = [] %}
@11-15       {%- set ns.calls = [] %}
@11-15     {%- endif %}
  {%- else %}
    {{- raise_exception('a message has the role ' ~ message.role ~ ', which this chat template does not know') }}
  {%- endif %}
{%- endfor %}
"""


def mistral_template(version: int, special: Collection[str], efforts: Collection[str] = (), effort: str | None = None) -> str | None:
    """Return the chat template of a version such as 13 for a vocabulary with these special tokens; None for an unknown version.

    `efforts` are the supported values of `reasoning_effort` (v15), `effort` the default.
    """
    if version not in _VERSIONS:
        return None
    thinks = version >= 13 and {"[THINK]", "[/THINK]"} <= set(special)
    lines = [line for line in _TEMPLATE.strip().split("\n") if _belongs(line, version, thinks)]
    if version >= 15:
        lines.insert(0, _effort_line(efforts, effort))
    return "\n".join(_FEATURE.sub("", line) for line in lines)


def _belongs(line: str, version: int, thinks: bool) -> bool:
    found = _FEATURE.match(line)
    if found is None:
        return True
    return int(found["low"]) <= version <= int(found["high"]) and found["thinks"] in ("", "+" if thinks else "-")


def _effort_line(efforts: Collection[str], effort: str | None) -> str:
    """Return a line that sets `settings`, the text between the tools and the first user message."""
    if effort is None:
        return "{%- set settings = '' %}"
    known = json.dumps(list(efforts))
    return (
        "{%- set chosen = reasoning_effort or " + json.dumps(effort) + " %}"
        "{%- if chosen not in " + known + " %}"
        "{{- raise_exception('reasoning_effort must be one of ' ~ " + known + "|join(', ')) }}{%- endif %}"
        """{%- set settings = '[MODEL_SETTINGS]{"reasoning_effort": ' ~ chosen|tojson ~ '}[/MODEL_SETTINGS]' %}"""
    )
