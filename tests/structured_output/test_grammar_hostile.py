"""Hostile structures are refused or enforced, quickly and without terminal output."""

import re
import time
from random import Random

import numpy as np
import pytest
from support.hostile.grammars import hostile
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer.errors import SamplingError
from mlxinfer.loading.find.resolve import ALIASES
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.load import load_tokenizer
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tokenizer.tokenizer import from_directory

LONGEST_COMPILE_S = 0.3
LONGEST_MASK_S = 0.025


def attempt(compiler, make, random, steps):
    """Seconds of CPU time that compiling took, in any thread, and the longest mask on a random walk; "held", or nothing where it was
    refused in one line, which would otherwise be the third; "gave up" where a step would have cost too much."""
    begin = time.process_time()
    try:
        constraint = compiler.compile(make())
    except SamplingError as error:
        return time.process_time() - begin, 0.0, "" if re.fullmatch("structure: .{1,2000}", str(error)) else repr(error)
    compiled, longest = time.process_time() - begin, 0.0
    ends = compiler.tokenizer.eos_token_ids
    for _ in range(steps):
        begin = time.thread_time()
        (row,) = constraint.rows([])
        longest = max(longest, time.thread_time() - begin)
        if constraint.fault:
            return compiled, longest, "gave up"
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert len(allowed), "nothing may follow"
        token = int(random.choice(list(allowed[:2000])))
        if token in ends:
            break
        begin = time.thread_time()
        constraint.forced()
        fault = constraint.advance(token)
        longest = max(longest, time.thread_time() - begin)
        if fault:
            assert "takes too long" in fault
            return compiled, longest, "gave up"
    return compiled, longest, "held"


def test_a_sample_of_them(tmp_path, capfd):
    compiler = GrammarCompiler(from_directory(tiny_directory(tmp_path, characters=JSON_CHARACTERS)), 96)
    found = [attempt(compiler, make, Random(i), 6) for i, (_, make) in enumerate(hostile(56, seed=1))]
    assert {how for _, _, how in found} <= {"held", "", "gave up"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.model(computes=False)
def test_a_thousand_of_them(capfd):
    compiler = GrammarCompiler(load_tokenizer(GGUFCheckpoint(ALIASES["smollm2"].find())), 49152)
    compiler.table()
    found = [(name, *attempt(compiler, make, Random(i), 25)) for i, (name, make) in enumerate(hostile(1000))]
    assert capfd.readouterr() == ("", "")
    compile_s, mask_s = (sorted(found, key=lambda one, at=at: -one[at])[:12] for at in (1, 2))
    with capfd.disabled():
        print({how or "refused": sum(one[3] == how for one in found) for how in ("held", "", "gave up")})  # noqa: T201
        print("compile ms", [(one[0], round(1000 * one[1])) for one in compile_s])  # noqa: T201
        print("mask ms", [(one[0], round(1000 * one[2], 1)) for one in mask_s])  # noqa: T201
    assert {one[3] for one in found} == {"held", "", "gave up"}
    assert compile_s[0][1] <= LONGEST_COMPILE_S
    assert mask_s[0][2] <= LONGEST_MASK_S
