"""SmolLM2 itself, of 30 layers: its traces and interventions against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.processes.optional import Later, needs

from mlxinfer import LLM
from mlxinfer.loading.find.resolve import resolve

torch = Later("torch")
needs("gguf")
pytestmark = [pytest.mark.torch, pytest.mark.model, pytest.mark.slow]

PROMPT = "The capital of France is Paris, and the capital of Italy is"
LIMIT = 1e-3
"""Of the largest number of what is compared: the stream of the first token has numbers of thousands."""
LAYER = 14


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, Any, list[int]]]:
    from transformers import AutoModelForCausalLM

    path = resolve("smollm2").path
    named = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, **named).eval()
    with LLM("smollm2", dtype="float32") as llm:
        yield llm, theirs, llm.tokenizer.encode(PROMPT)


def near(found: Any, expected: Any) -> bool:
    ours, theirs = np.array(found), expected.detach().numpy()
    return bool(np.abs(ours - theirs).max() <= LIMIT * max(np.abs(theirs).max(), 1.0))


def logits(theirs: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return theirs(torch.tensor([ids]), use_cache=False).logits[0]


def test_streams_patterns_and_logits(pair: tuple[LLM, Any, list[int]]) -> None:
    llm, theirs, ids = pair
    trace = llm.trace(PROMPT, what=["residual", "attention", "logits"])
    assert trace.token_ids == ids
    with torch.no_grad():
        found = theirs(torch.tensor([ids]), use_cache=False, output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == len(trace["residual"]) == 31
    for layer, expected in enumerate(found.hidden_states[:-1]):
        assert near(trace["residual"][layer], expected[0]), layer
    for layer, expected in enumerate(found.attentions):
        assert near(trace["attention"][layer], expected[0]), layer
    assert near(trace["logits"], found.logits[0])


def test_interventions_are_hooks_and_are_undone_exactly(pair: tuple[LLM, Any, list[int]]) -> None:
    llm, theirs, ids = pair
    before = np.array(llm.logits(ids))
    vector = np.random.default_rng(0).normal(size=576).astype(np.float32)
    other = llm.trace(ids[::-1], layers=LAYER, what="residual")
    block = theirs.model.layers[LAYER]

    def steered(_: Any, given: Any) -> Any:
        return (given[0] + 2 * torch.tensor(vector), *given[1:])

    def patched(_: Any, given: Any) -> Any:
        x = given[0].clone()
        x[0, 3] = torch.tensor(np.array(other["residual"][LAYER][3]))
        return (x, *given[1:])

    def zero(_: Any, __: Any, out: Any) -> Any:
        return torch.zeros_like(out)

    ways = [
        (llm.steer(LAYER, vector, 2), block.register_forward_pre_hook, steered),
        (llm.patch(other, layer=LAYER, positions=3), block.register_forward_pre_hook, patched),
        (llm.ablate("mlp", LAYER), block.mlp.register_forward_hook, zero),
    ]
    for ours, register, hook in ways:
        handle = register(hook)
        try:
            expected = logits(theirs, ids)
        finally:
            handle.remove()
        with ours:
            changed = np.array(llm.logits(ids))
        assert near(changed, expected)
        assert np.abs(changed - before).max() > 0.01
        assert np.array_equal(np.array(llm.logits(ids)), before)
