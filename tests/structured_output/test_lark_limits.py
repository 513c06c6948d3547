"""The limits apply to the grammar as llguidance reads it, and checking takes linear time.

Each chain here overflows llguidance's stack, which ends the process, if the check misses it.
"""

import asyncio
import json
import tracemalloc
from threading import Event

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import AsyncLLM, Lark, Schema
from mlxinfer.errors import SamplingError
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.structured_output.lark_limits import MOST_TOKENS, check_lark
from mlxinfer.structured_output.schema import normalized
from mlxinfer.tokenizer.tokenizer import from_directory

DEEP = 1700


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return GrammarCompiler(from_directory(tiny_directory(tmp_path_factory.mktemp("hidden"), characters=JSON_CHARACTERS)), 96)


def rules(line, count=DEEP, first="r0"):
    return "\n".join([f"start: {first}", *(line.format(i=i, j=i + 1) for i in range(count))])


LARK = {
    "between line breaks in expressions": rules('r{i}: /\n"/ (r{j}) /"\n/') + f'\nr{DEEP}: "a"',
    "by hyphens": rules("r-{i}: (r-{j})", first="r-0") + f'\nr-{DEEP}: "a"',
    "behind a comment": rules('r{i}: # "\n | (r{j}) # "') + f'\nr{DEEP}: "a"',
    "behind flags": rules("r{i}: /a/ir{j}") + f'\nr{DEEP}: "a"',
    "by capital letters": rules("r{i}: xA{j}\nA{i}: r{i}", 900) + '\nA900: "a"\nx: "x"',
    "behind brackets in an attribute": rules('r{i}[stop="]"]: (r{j})') + f'\nr{DEEP}: "a"',
    "as arguments of a template": "start: " + "a{" * DEEP,
    "in a nested grammar": rules("r{i}: r{j}", 250) + "\nr250: %lark {\n" + rules("q{i}: q{j}", 250, "q0") + '\nq250: "a"\n}',
}


@pytest.mark.parametrize("how", LARK)
def test_rules_of_a_grammar_do_not_hide_from_the_limits(how):
    with pytest.raises(SamplingError, match=r"leads \d+ rules and brackets deep"):
        check_lark(LARK[how])


def step(reference):
    return {"type": "object", "properties": {"a": {"items": reference}}, "required": ["a"]}


def chain(key, pointer, count=DEEP):
    return {"$ref": pointer(0), key: {f"{i}": step({"$ref": pointer(i + 1)}) for i in range(count)} | {f"{count}": {"type": "null"}}}


def named(keyword, name, reference, count=DEEP):
    parts = {f"{i}": {keyword: name(i), **step({"$ref": reference(i + 1)})} for i in range(count)}
    return {"$ref": reference(0), "$defs": {**parts, "end": {keyword: name(count), "type": "null"}}}


ADDRESS = "https://a.org/all"
FOLLOWED = {
    "percent signs": lambda count: chain("$defs", lambda i: f"#/%24defs/{i}", count),
    "another keyword": lambda count: chain("parts", lambda i: f"#/parts/{i}", count),
    "anchors": lambda count: named("$anchor", lambda i: f"a{i}", lambda i: f"#a{i}", count),
    "addresses of parts": lambda count: named("$id", lambda i: f"http:{i}", lambda i: f"http:{i}", count),
    "names of parts": lambda count: named("$id", lambda i: f"T{i}", lambda i: f"T{i}", count),
    "the schema's address": lambda count: {"$id": ADDRESS, **chain("$defs", lambda i: f"{ADDRESS}#/$defs/{i}", count)},
    "an address beside it": lambda count: {"$id": ADDRESS, **chain("$defs", lambda i: f"all#/$defs/{i}", count)},
    "pointers in a part with an address": lambda count: {
        "$ref": "#/$defs/x",
        "$defs": {"x": {"$id": "x", **chain("$defs", lambda i: f"#/$defs/{i}", count)}},
    },
}
REFUSED = {
    "data": lambda count: chain("default", lambda i: f"#/default/{i}", count),
    "a list that is no keyword's": lambda count: {"$ref": "#/odd/0", "odd": [step({"$ref": f"#/odd/{i + 1}"}) for i in range(count)]},
    "signs before numbers": lambda count: {"$ref": "#/anyOf/+0", "anyOf": [step({"$ref": f"#/anyOf/+{i + 1}"}) for i in range(count)]},
}


@pytest.mark.parametrize("how", FOLLOWED)
def test_references_of_all_kinds_are_followed_and_counted(compiler, how):
    constraint = compiler.compile(Schema(FOLLOWED[how](2)))
    fits = compiler.tokenizer.encode('{"a":[{"a":[null]}]}', add_special_tokens=False)
    assert constraint.allowed(fits) == len(fits)
    other = compiler.tokenizer.encode('{"a":[{"a":[1]}]}', add_special_tokens=False)
    assert constraint.allowed(other) < len(other)
    with pytest.raises(SamplingError, match=r"references lead \d+ levels deep"):
        compiler.compile(Schema(FOLLOWED[how](DEEP)))
    with pytest.raises(SamplingError, match=r"references lead \d+ levels deep"):
        compiler.compile(Lark(f"start: %json {json.dumps(FOLLOWED[how](DEEP))}"))


@pytest.mark.parametrize("how", REFUSED)
def test_references_to_what_is_not_a_schema_are_refused(compiler, how):
    with pytest.raises(SamplingError, match="no schema at"):
        compiler.compile(Schema(REFUSED[how](DEEP)))


def test_schemas_inside_grammars_are_compiled_as_they_were_checked(compiler):
    inside = compiler.compile(Lark(f'start: "x" %json {json.dumps(FOLLOWED["anchors"](1))} "y"'))
    fits = compiler.tokenizer.encode('x{"a":[null]}y', add_special_tokens=False)
    assert inside.allowed(fits) == len(fits)
    with pytest.raises(SamplingError, match="a value in it is not JSON"):
        check_lark('start: %json {"const": ' + "1" * 5000 + "}")  # llguidance's reader of JSON takes it


UNITS = [
    "/\\",
    "!?",
    "?_",
    '"\\',
    "<",
    "a[",
    "a<",
    "x[",
    '"',
    "%json {",
    "a{",
    "[",
    "(",
    "a",
    " ",
    "\\",
    "/a",
    "#",
    "%json [",
    ":x[",
    "\\x[",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", UNITS)
def test_any_grammar_is_checked_in_one_pass(unit):
    """Quadratic reading of 250 KB would take minutes: 2 s for 40 KB of `/\\`."""
    text = unit * (250_000 // len(unit))
    try:
        found = check_lark("start: " + text)
    except SamplingError:
        return
    assert found.tokens <= MOST_TOKENS
    assert found.text == "start: " + text


def test_long_names_are_kept_once():
    """Written out for each of 2000 parts, 100 KB are 200 MB."""
    schema = {"properties": {"n" * 100_000: {"properties": {f"{i:x}": {"items": {}} for i in range(2000)}}}}
    schema["properties"]["n" * 100_000]["required"] = [f"{i:x}" for i in range(2000)]
    by_name = {"$defs": {"n" * 100_000: {"$anchor": "a"}}, "anyOf": [{"$ref": "#a"}] * 1000}
    tracemalloc.start()
    try:
        normalized(schema)
        with pytest.raises(SamplingError, match="use shorter names"):
            normalized(by_name)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(60)
def test_patterns_of_nested_schemas_are_counted_once():
    """Counted again at each level, these took 11 s; deeper inside `anyOf`, each level doubled the time."""
    schema = {"allOf": [{"pattern": "a"}, *({} for _ in range(30_000))]}
    for _ in range(100):
        schema = {"allOf": [schema]}
    assert normalized(schema) == schema


def test_grammars_that_are_compiled_keep_no_other_request_waiting(tmp_path, monkeypatch):
    """They have threads of their own: in those of the event loop, a few of them would keep chat templates from being rendered."""
    done, begun = Event(), []

    def wait(self, structure, *, own=False):
        begun.append(structure)
        done.wait(60)
        raise SamplingError("structure: it took too long")

    monkeypatch.setattr(GrammarCompiler, "compile", wait)

    async def run():
        async with AsyncLLM(tiny_directory(tmp_path, characters=JSON_CHARACTERS)) as llm:
            held = [asyncio.ensure_future(llm.generate("a", max_tokens=2, structure=Lark(f'start: "{i}"'))) for i in range(40)]
            while len(begun) < 2:
                await asyncio.sleep(0)
            for _ in range(100):  # until all of them wait for a thread
                await asyncio.sleep(0)
            answer = await llm.chat([{"role": "user", "content": "b"}], max_tokens=2)
            assert not any(task.done() for task in held)
            done.set()
            assert all(isinstance(each, SamplingError) for each in await asyncio.gather(*held, return_exceptions=True))
            return answer

    assert asyncio.run(asyncio.wait_for(run(), 50)).finish_reason in ("length", "stop")
