"""GBNF as llama.cpp's clients send it: what it allows, and what is wrong with it."""

import pytest
from support.tokenizers.byte_tokenizer import byte_tokenizer

from mlxinfer.errors import SamplingError
from mlxinfer.structure import Lark
from mlxinfer.structured_output.gbnf import gbnf_to_lark
from mlxinfer.structured_output.grammar import GrammarCompiler

TOKENIZER = byte_tokenizer()
END = min(TOKENIZER.eos_token_ids)
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)

JSON = r"""
root   ::= object   # as llama.cpp ships it
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

CASES = [
    (JSON, ['{"a": [1, -2.5e3, "x\\u00e9\\n", {}], "b": null}', "{}"], ["[1]", '{"a": 01}', '{"a"}']),
    ('root ::= [a-z]* "a"', ["a", "bca", "aaa"], ["", "b"]),
    ('root ::= word " " word\nword ::= [a-z]+ | [0-9]{2}', ["ab 12", "a b"], ["a 1", "a  b"]),
    ('root ::= "a" | \n "b"', ["a", "b"], ["ab"]),
    (r'root ::= "\"\\\x41\u00e9\U0001F98A\n\t\r"', ['"\\Aé🦊\n\t\r'], ["Aé"]),
    (r"root ::= [\]\-^a] [a-c-] [^\n\]]", ["]-x", "^b-", "ac/"], ["bax", "]d-", "aa\n"]),
    ("root ::= . .", ["\nx", "é🦊"], ["a", "abc"]),
    ('root ::= ("a" "b"?){2,3} "c"{2} "d"{1,}', ["abaccd", "aaaccddd"], ["accd", "aacd", "aacc"]),
    ('root ::= "(" root ")" | ', ["", "(())"], ["(", "())"]),
    ('root ::= my-Rule_2 "!"\nmy-Rule_2 ::= "x" | "y" my-Rule_2', ["x!", "yyx!"], ["y!"]),
]


def accepts(grammar, text):
    constraint = COMPILER.compile(Lark(grammar))
    if any(constraint.advance(token) for token in TOKENIZER.encode(text, add_special_tokens=False)):
        return False
    return bool(constraint.rows([])[0][END // 32] >> (END % 32) & 1)


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES, ids=range(len(CASES)))
def test_what_it_allows(grammar, right, wrong):
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ("root ::= [a-z", "line 1: '[a-z' cannot be read"),
        ('root ::= "a"\nb ::= (("x")', "'(' is not closed"),
        ('root ::= "a" )', "line 1: ')' closes nothing"),
        ('root ::= "a"\n\nx ::= nothing', "line 3: rule 'x' refers to 'nothing'"),
        ('a ::= "b"', "rule 'root' is missing"),
        ("::=", "a rule's name and ::= must come before '::='"),
        ('root ::= (* "a")', "'*' repeats nothing"),
        ('root ::= "\\q"', "is no escape"),
        ('root ::= "\\uD800"', "is no character"),
        ("root ::= []", "[] allows no character"),
        ('root ::= ("a"\nb ::= "c")', "line 2: '(' is not closed"),
    ],
)
def test_what_is_wrong_is_told(grammar, told):
    with pytest.raises(SamplingError) as found:
        COMPILER.compile(Lark(grammar))
    assert str(found.value).startswith("structure: grammar: it is not GBNF: ")
    assert told in str(found.value)


def test_rules_become_terminals_only_as_long_as_they_stay_short():
    """Written out, r0 would have 2 ** 60 letters."""
    text = "\n".join(["root ::= r0", *[f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)], 'r60 ::= "a"'])
    lark = gbnf_to_lark(text)
    assert lark.count("\nT") == 13
    assert len(lark) < 2 * len(text)
