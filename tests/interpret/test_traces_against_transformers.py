"""Traces and interventions against transformers' hidden states, attentions and forward hooks, for every golden family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import tiny_model
from support.processes.optional import Later

from mlxinfer import LLM
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.interpret.places import native
from mlxinfer.models.block import Block
from mlxinfer.models.decoder import Decoder

torch = Later("torch")
pytestmark = pytest.mark.torch

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
QUICK = {"llama", "gemma3_text", "gpt_oss", "granitemoehybrid", "lfm2_moe", "minicpm3", "olmo2", "phi3", "qwen3_5_text", "qwen3_moe"}
"""One of each build; the others are `slow`."""
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(folder.name for folder in GOLDEN.iterdir())]
IDS = np.random.default_rng(3).integers(1, 90, 70).tolist()
LIMIT = 1e-3


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Any:
    """A family here and in transformers."""
    from transformers import AutoModelForCausalLM

    model = tiny_model(request.param)
    assert isinstance(model, Decoder)
    if not all(isinstance(block, Block) for block in model.blocks):
        with pytest.raises(UnsupportedModelError, match="blocks of its own build"):
            native(model)
        pytest.skip("its blocks are not an attention and a feed-forward layer in turn")

    if request.param == "mistral4":
        pytest.skip("transformers has no causal model of it by itself")
    theirs = AutoModelForCausalLM.from_pretrained(GOLDEN / request.param, dtype=torch.float32, attn_implementation="eager").eval()
    with LLM(GOLDEN / request.param, dtype="float32") as llm:
        yield llm, theirs


def states(theirs: Any, **wanted: bool) -> Any:
    with torch.no_grad():
        return theirs(torch.tensor([IDS]), use_cache=False, **wanted)


def test_the_streams_are_transformers_hidden_states(pair: Any) -> None:
    llm, theirs = pair
    trace = llm.trace(IDS, what=["residual", "attention_out", "mlp", "logits"])
    hidden = states(theirs, output_hidden_states=True).hidden_states
    for layer, expected in enumerate(hidden[:-1]):
        assert np.abs(np.array(trace["residual"][layer]) - expected[0].numpy()).max() < LIMIT
    for layer in range(len(hidden) - 1):  # the parts are what the streams differ by
        parts = trace["residual"][layer] + trace["attention_out"][layer] + trace["mlp"][layer]
        assert mx.allclose(parts, trace["residual"][layer + 1], atol=LIMIT)
    assert np.abs(np.array(trace["logits"]) - states(theirs).logits[0].numpy()).max() < 2 * LIMIT


def test_the_patterns_are_transformers_attentions(pair: Any) -> None:
    llm, theirs = pair
    patterns = llm.trace(IDS, what="attention")["attention"]
    attentions = [a for a in states(theirs, output_attentions=True).attentions if a is not None]
    assert len(attentions) == len(patterns)
    for pattern, expected in zip(patterns.values(), attentions, strict=True):
        assert np.abs(np.array(pattern) - expected[0].numpy()).max() < LIMIT


def changed(theirs: Any, layer: int, change: Any) -> np.ndarray:
    """Logits with a hook on what enters a layer."""
    block = theirs.model.layers[layer]
    handle = block.register_forward_pre_hook(lambda _, args, kwargs: ((change(args[0]), *args[1:]), kwargs), with_kwargs=True)
    try:
        logits: np.ndarray = states(theirs).logits[0].numpy()
        return logits
    finally:
        handle.remove()


def test_steering_and_patching_are_forward_hooks(pair: Any) -> None:
    llm, theirs = pair
    before = np.array(llm.logits(IDS))
    vector = np.random.default_rng(0).normal(size=theirs.config.hidden_size).astype(np.float32)
    with llm.steer(1, vector, 0.5):
        steered = np.array(llm.logits(IDS))
    assert np.abs(steered - changed(theirs, 1, lambda x: x + 0.5 * torch.tensor(vector))).max() < 2 * LIMIT

    other = llm.trace(IDS[::-1], layers=1, what="residual")
    with llm.patch(other, layer=1, positions={4: 30, 50: 2}):
        patched = np.array(llm.logits(IDS))

    def put(x: Any) -> Any:
        x = x.clone()
        for here, there in {4: 30, 50: 2}.items():
            x[0, here] = torch.tensor(np.array(other["residual"][1][there]))
        return x

    assert np.abs(patched - changed(theirs, 1, put)).max() < 2 * LIMIT
    assert np.abs(steered - before).max() > 0.01 < np.abs(patched - before).max()
    assert np.array_equal(np.array(llm.logits(IDS)), before)


def feed_forward(block: Any) -> list[Any]:
    """The modules of the feed-forward part, whose outputs are added to the stream."""
    after = getattr(block, "post_feedforward_layernorm", None)
    if after is not None:
        return [after]
    names = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")
    return [part for name in names if (part := getattr(block, name, None)) is not None]


def test_ablation_is_a_hook_that_returns_zeros(pair: Any) -> None:
    llm, theirs = pair

    def zero(_: Any, __: Any, out: Any) -> Any:
        return tuple(torch.zeros_like(x) for x in out) if isinstance(out, tuple) else torch.zeros_like(out)

    handles = [part.register_forward_hook(zero) for part in feed_forward(theirs.model.layers[0])]
    try:
        expected = states(theirs).logits[0].numpy()
    finally:
        for handle in handles:
            handle.remove()
    with llm.ablate("mlp", 0):
        assert np.abs(np.array(llm.logits(IDS)) - expected).max() < 2 * LIMIT
