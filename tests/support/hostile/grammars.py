"""Hostile structures: large, deep, ambiguous, recursive, contradictory or nonsense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from mlxinfer.structure import Choice, Lark, Regex, Schema, Structure

_ATOMS = ["a", "(a|b|ab)", "[a-z]", ".", "\\w", "(?:a*)", "\\d+", "(a+)+", '[^"]*', "\\p{L}", "(?i:k)", "\\x{10FFFF}", "(?s:.)"]
_NONSENSE = [
    "(?=a)b",
    "(?!a)b",
    "(?<=a)b",
    "(a)\\1",
    "a{99999999}",
    "a{5,2}",
    "[z-a]",
    "(",
    "[",
    "\\",
    "*",
    "a**",
    "(?P<n>a)(?P=n)",
    "\\p{Foo}",
]


def hostile(count: int, seed: int = 0) -> Iterator[tuple[str, Callable[[], Structure]]]:
    """`count` structures with what they are. Making one may raise `SamplingError` already."""
    makers = [
        _regex,
        _nonsense,
        _deep_schema,
        _wide_schema,
        _counts,
        _references,
        _contradiction,
        _random_schema,
        _lark,
        _lark_bomb,
        _gbnf,
        _choice,
        _chains,
        _products,
    ]
    for number in range(count):
        maker = makers[number % len(makers)]
        random = Random(f"{seed} {number}")
        yield maker.__name__[1:], lambda maker=maker, random=random: maker(random)


def _regex(r: Random) -> Structure:
    pattern = "".join(r.choice(_ATOMS) + r.choice(["", "*", "+", "?", f"{{1,{r.choice([3, 50, 2000])}}}"]) for _ in range(r.randint(1, 12)))
    for _ in range(r.choice([0, 0, 1, 3, 200])):
        pattern = f"({pattern})" + r.choice(["", "*", "{0,20}"])
    return Regex(pattern)


def _nonsense(r: Random) -> Structure:
    return r.choice([Regex, lambda text: Schema({"type": "string", "pattern": text})])(r.choice(_NONSENSE) * r.choice([1, 2, 100]))


def _deep_schema(r: Random) -> Structure:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(r.choice([20, 60, 150, 199, 250, 3000])):
        key = r.choice(["items", "additionalProperties", "a", "anyOf", "allOf"])
        wrapped: dict[str, Any] = {key: schema} if key in ("items", "additionalProperties") else {"properties": {"a": schema}}
        schema = {key: [schema]} if key in ("anyOf", "allOf") else wrapped
    return Schema(schema)


def _wide_schema(r: Random) -> Structure:
    count = r.choice([100, 1000, 4000, 20000])
    names = [f"{r.choice('abcxyz')}{i}" for i in range(count)]
    made: Callable[[], Any] = r.choice(
        [
            lambda: {"type": "object", "properties": {name: {"type": r.choice(["string", "integer"])} for name in names}},
            lambda: {"enum": names},
            lambda: {"anyOf": [{"const": name} for name in names]},
            lambda: {"type": "object", "patternProperties": {f"^{name}.*$": {} for name in names[:2000]}},
            lambda: {"type": "object", "properties": {name: {} for name in names}, "required": names, "additionalProperties": False},
            lambda: {"type": "array", "prefixItems": [{"const": name} for name in names]},
            lambda: {"oneOf": [{"type": "object", "properties": {name: {"const": 1}}, "required": [name]} for name in names[:300]]},
        ]
    )
    return Schema(made())


def _counts(r: Random) -> Structure:
    most = r.choice([100, 10_000, 10**6, 2**31, 2**63, 2**70, -1, 1.5])
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": most},
        {"type": "string", "minLength": most},
        {"type": "string", "minLength": most, "pattern": "^[ab]*c[ab]*$"},
        {"type": "array", "minItems": most, "items": {"type": "string"}},
        {"type": "array", "maxItems": most, "items": {"type": "array", "maxItems": most, "items": {}}},
        {"type": "integer", "multipleOf": most},
        {"type": "number", "multipleOf": 1e-9, "maximum": most},
        {"type": "object", "minProperties": most},
        {"type": "integer", "minimum": -(10 ** r.choice([1, 18, 30, 300])), "maximum": 10 ** r.choice([1, 18, 30, 300])},
        {"type": "string", "pattern": f"^(a{{1,{min(int(abs(most)), 10**6)}}}b?){{1,50}}$"},
    ]
    return Schema(r.choice(kinds))


def _references(r: Random) -> Structure:
    kinds: list[dict[str, Any]] = [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/x.json"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "#" + "/a" * 2000},
        {"$ref": 7},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}},
        {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}}, "$ref": "#/$defs/d0"},
        {"$defs": {f"d{i}": {"properties": {"l": {"$ref": f"#/$defs/d{i + 1}"}, "r": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(60)}},
        {"$id": "a", "$anchor": "b", "$dynamicRef": "#b", "properties": {"x": {"$ref": "#b"}}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"], "additionalProperties": False},
    ]
    return Schema(r.choice(kinds))


def _contradiction(r: Random) -> Structure:
    kinds: list[Any] = [
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"enum": []},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"const": "a", "type": "integer"},
        {"type": []},
        {"type": "foo"},
        {"properties": []},
        {"required": "a"},
        {"items": 7},
        {"anyOf": {}},
        {"allOf": [{"pattern": "^a"}, {"pattern": "^b"}], "type": "string"},
        {"type": "string", "pattern": "^[^\\x00-\\x{10FFFF}]$"},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1},
        False,
    ]
    return Schema(r.choice(kinds))


def _random_schema(r: Random, depth: int = 0) -> Structure:
    keys = [
        "type",
        "properties",
        "items",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "enum",
        "const",
        "required",
        "pattern",
        "format",
        "minimum",
        "maxLength",
        "$ref",
        "$defs",
        "x-guidance",
    ]

    def value(depth: int) -> Any:
        kind = r.randrange(7 if depth < 4 else 4)
        if kind < 4:
            return r.choice([None, True, False, 0, -1, 1e308, "string", "object", "", "#", "^a$", "\ud7ff", "array", 2**64])
        if kind == 4:
            return [value(depth + 1) for _ in range(r.randint(0, 4))]
        return {r.choice(keys): value(depth + 1) for _ in range(r.randint(0, 5))}

    return Schema({r.choice(keys): value(1) for _ in range(r.randint(1, 6))})


def _lark(r: Random) -> Structure:
    texts = [
        "start: start",
        "start: a\na: b\nb: a",
        'start: start start | "a"',
        'start: "a" start "b" | ',
        "start: /(?=a)/",
        "start: nothing",
        "start: /a/ /a*/ /a*/ /a*/ /b/",
        "",
        "garbage ::= ",
        'start: %json {"type": "object"}',
        'start: %json {"$ref": "https://example.com"}',
        "%import common.WORD\nstart: WORD",
        "%import os.system\nstart: system",
        "start: <|im_start|> <[0-100000]> <[9999999999]>",
        "start[capture, max_tokens=5]: /.*/",
        "start[temperature=9e99]: /a/",
        "start: gen\ngen[stop=/x/]: /(.|\\n)*/",
        'start: ("a" | "b"){1,1000000}',
        "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        "start: @other",
        'start: "' + "a" * 100_000 + '"',
        "start: /[/",
        'start: %regex { "substring_words": 7 }',
        '%llguidance {"no_forcing": true, "allow_invalid_utf8": true}\nstart: /./',
    ]
    return Lark(r.choice([text for text in texts if text]))


def _lark_bomb(r: Random) -> Structure:
    depth = r.choice([5, 20, 60, 400])
    kind = r.randrange(4)
    if kind == 0:
        rules = [f"r{i}: r{i + 1} r{i + 1}" for i in range(depth)]
        return Lark("\n".join(["start: r0", *rules, f'r{depth}: "a"']))
    if kind == 1:
        rules = [f"T{i}: T{i + 1} T{i + 1}" for i in range(min(depth, 60))]
        return Lark("\n".join(["start: T0", *rules, f'T{min(depth, 60)}: "a"']))
    if kind == 2:
        return Lark(
            "start: "
            + " | ".join(f"r{i}" for i in range(depth * 20))
            + "".join(f'\nr{i}: /x{{0,{i}}}/ "y" | r{i} r{i}' for i in range(depth * 20))
        )
    return Lark('start: a*\na: b* "x"?\nb: c* "y"?\nc: "z"? | a b c')


def _gbnf(r: Random) -> Structure:
    texts = [
        'root ::= root "a" | "b"',
        "root ::= root",
        'root ::= a\na ::= b "x"\nb ::= a | ""',
        'root ::= ("a" | "b"){1,100000}',
        "root ::= [a-z",
        "root ::= (((((",
        'root ::= "' + "a" * 50_000 + '"',
        "\n".join(["root ::= r0", *[f"r{i} ::= r{i + 1} r{i + 1}" for i in range(r.choice([10, 40, 500]))], 'r500 ::= "a"']),
        "root ::= nothing",
        'root ::= "a" root "b" | [^x]* root?',
        "::=",
    ]
    return Lark(r.choice(texts))


def _choice(r: Random) -> Structure:
    count = r.choice([1, 100, 5000, 30_000])
    return Choice(["".join(r.choice('ab"\\\n\u20ac') for _ in range(r.randint(1, 8))) + str(i) for i in range(count)])


def _chains(r: Random) -> Structure:
    """References so deep that reading them recursively overflows the stack."""
    count = r.choice([100, 300, 3000, 9000])
    kind = r.randrange(6)
    if kind == 0:
        return Lark("\n".join(["start: r0", *[f'r{i}: "a" r{i + 1} | "b"' for i in range(count)], f'r{count}: "a"']))
    if kind == 1:
        return Lark("\n".join(["start: T0", *[f'T{i}: "a" T{i + 1}' for i in range(count)], f'T{count}: "a"']))
    if kind == 2:
        return Lark("\n".join(["root ::= r0", *[f'r{i} ::= "a" r{i + 1}' for i in range(count)], f'r{count} ::= "a"']))
    step: Callable[[dict[str, Any]], dict[str, Any]] = r.choice(
        [
            lambda following: {"type": "object", "properties": {"a": following}, "required": ["a"]},
            lambda following: {"allOf": [following]},
            lambda following: {"items": {"items": {"items": following}}},
            lambda following: {"anyOf": [following, {"type": "null"}]},
        ]
    )
    return Schema({"$ref": "#/$defs/0", "$defs": {f"{i}": step({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)} | {f"{count}": {}}})


def _products(r: Random) -> Structure:
    """Grammars that are multiplied out, compared pairwise, or tokenized again in every step."""
    many = r.choice([20, 100, 400])
    each = {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(many)}}
    kinds: list[Structure] = [
        Schema({**each, "anyOf": [{"required": [f"a{i}"]} for i in range(many)]}),
        Schema({"allOf": [{"pattern": f"^[a-z]*x{i}"} for i in range(many)], "type": "string"}),
        Schema({"type": "object", "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(many // 8)]}),
        Schema({"type": "object", "properties": {f"o{i}": each for i in range(many // 10)}}),
        Schema({"const": "a" * 500 * many}),
        Schema({"type": "array", "items": {"const": "abc"}, "minItems": 1000 * many}),
        Regex("ab" * 200 * many),
        Choice(["ab" * 200 * many]),
        Lark(f'start: %json {{"type": "integer", "multipleOf": {many * 1001}}}'),
    ]
    return r.choice(kinds)
