"""Expressions of foreign files fit what Python's `re` says that they fit, in few steps."""

import re
from random import Random

import pytest

from mlxinfer.util.name_pattern import MOST_STEPS, Endings, NamePattern, PatternError, Steps

PIECES = [
    "a",
    "b",
    ".",
    r"\.",
    "[ab]",
    "[^a]",
    r"\d",
    "[0-9-]",
    "(a|b)",
    "(?:ab|a|)",
    "(?P<n>b.)",
    "^",
    "$",
    "(?=b)",
    "(?!.*b)",
    r"[\w.]",
    "x|y",
    "{",
    "a{b",
]
REPEATS = ["", "", "", "*", "+", "?", "*?", "{2}", "{1,3}", "{,2}", "{2,}"]
ENDLESS = [
    "[^x]?" * 24 + "!",
    "[^x]?" * 40 + "!",
    "(a|a)" * 40 + "!",
    "(a+)+!",
    "(a*)*!",
    "((a|b|ab)*)*!",
    "(.*a){20}!",
    "(a?){1000}" * 3 + "!",
    "(.*.*.*)*!",
]


def random_pattern(random, depth=2):
    found = ""
    for _ in range(random.randint(1, 4)):
        piece = random.choice(PIECES)
        if depth and random.random() < 0.3:
            piece = f"({random_pattern(random, depth - 1)})"
        found += piece if piece in ("^", "$") else piece + random.choice(REPEATS)
    return found


def test_expressions_fit_what_they_fit_in_python():
    random, tried = Random(3), 0
    for _ in range(3000):
        pattern = random_pattern(random)
        try:
            expected = re.compile(pattern.replace("{,", "{0,"))
        except re.error:
            continue
        mine = NamePattern(pattern, Steps())
        for _ in range(4):
            name = "".join(random.choices("ab.01xy", k=random.randint(0, 7)))
            assert mine.matches(name, whole=True) == (expected.fullmatch(name) is not None), (pattern, name)
            assert mine.matches(name, whole=False) == (expected.match(name) is not None), (pattern, name)
            tried += 1
    assert tried > 8000


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        (
            r"+:.*\.18\..*(?:gate|up).*",
            ["model.layers.18.mlp.gate_proj"],
            ["model.layers.1.mlp.gate_proj", "model.layers.18.mlp.down_proj"],
        ),
        (r"+:^model\.layers\.([0-9]|1[0-5])\.", ["model.layers.7.x", "model.layers.15.x"], ["model.layers.16.x", "a.model.layers.1."]),
        (r"+:lm_head", ["lm_head"], ["model.lm_head"]),
        (r"+:(?!.*layers\.(1|2)\.).*proj", ["layers.3.q_proj"], ["layers.2.q_proj"]),
    ],
)
def test_rules_as_people_write_them(pattern, names, others):
    rule = NamePattern(pattern.removeprefix("+:"), Steps())
    assert [rule.matches(name, whole=False) for name in names + others] == [True] * len(names) + [False] * len(others)


@pytest.mark.parametrize("pattern", ENDLESS)
@pytest.mark.timeout(60)
def test_what_python_tries_for_ever_takes_few_steps(pattern):
    steps = Steps()
    name = "model.layers.0." + "a" * 40
    assert not NamePattern(f"(.*\\.)?({pattern})", steps).matches(name, whole=True)
    assert 0 < steps.taken < MOST_STEPS // 10


def test_steps_of_all_matches_are_counted_together():
    steps = Steps(300)
    endings = Endings({"(a|b)*!": 1}, steps)
    assert endings.value("a" * 20, 0) == 0
    with pytest.raises(PatternError, match=r"the pattern \(a\|b\)\*! takes more than 300 steps"):
        [endings.value("a" * 20, 0) for _ in range(100)]
    doubled = NamePattern("(" * 30 + "." + "){1,2}" * 30, Steps(10_000))  # two ways at each bracket
    with pytest.raises(PatternError, match="takes more than 10000 steps"):
        doubled.matches("a" * 40, whole=True)
    with pytest.raises(PatternError, match="has 1200 characters"):
        NamePattern("a" * 1200, steps)
    with pytest.raises(PatternError, match="a name of 5000 characters"):
        NamePattern("a.*b", Steps()).matches("a" * 5000, whole=True)
    with pytest.raises(PatternError, match="more than 50 brackets"):
        NamePattern("(" * 60 + ")" * 60, Steps())


@pytest.mark.parametrize(
    "pattern", ["(", ")", "[a", "*", "a**", "a{2}{3}", "a{3,2}", "\\", r"(a)\1", "(?i)a", "(?<=a)b", r"\x41", "(?", "(?P<n"]
)
def test_what_is_not_understood_is_an_error(pattern):
    with pytest.raises(PatternError):
        NamePattern(pattern, Steps())


def test_names_that_end_with_a_pattern():
    patterns = {"q_proj": 1, r"layers\.1\..*v_proj": 2, "^model.layers.0.mlp.up_proj": 3, "self_attn.q_proj": 4, r"(k|q)_proj": 5}
    values = {
        "model.layers.0.self_attn.q_proj": 1,
        "model.layers.1.self_attn.v_proj": 2,
        "model.layers.0.mlp.up_proj": 3,
        "x.model.layers.0.mlp.up_proj": 9,
        "model.layers.0.my_q_proj": 9,
        "model.layers.0.self_attn.k_proj": 5,
        "q_proj": 1,
    }
    endings = Endings(patterns, Steps())
    assert {name: endings.value(name, 9) for name in values} == values
