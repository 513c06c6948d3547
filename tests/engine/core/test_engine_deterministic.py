"""With `deterministic`, results do not depend on the rows computed together, to the bit.

The device here is a CPU, whose arithmetic does not. The test therefore makes the embedding of the model depend on the number of rows.
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN, request
from support.models.plain_weights import PlainWeights

from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Token
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.nn.linear import Embedding

Said = list[tuple[int, float | None, tuple[tuple[int, float], ...]]]

rng = np.random.default_rng(4)
TRUNK = rng.integers(3, 96, 200).tolist()
PROMPTS = [[*TRUNK[: int(rng.integers(1, 150))], *rng.integers(3, 96, int(rng.integers(1, 40))).tolist()] for _ in range(7)]


def shaky_model(name: str) -> Model:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    model = build(config, PlainWeights.open(GOLDEN / name / "model.safetensors"))
    model.embedding = Shaky(model.embedding)
    return model


class Shaky:
    def __init__(self, embedding: Embedding) -> None:
        self.dtype = embedding.dtype
        self.as_linear = embedding.as_linear
        self._embedding = embedding

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._embedding(tokens) * (1 + 1e-3 * tokens.shape[0])


def requests(prompts: list[list[int]] = PROMPTS, limit: int = 16) -> list[Sequence]:
    return [request(p, limit, temperature=0.8 * (i % 2), seed=i, logprobs=2) for i, p in enumerate(prompts)]


def engine(model: Model, *, deterministic: bool, prefix_cache: bool = True) -> Engine:
    config = EngineConfig(
        max_context=256,
        kv_cache_tokens=320,
        max_num_batched_tokens=64,
        max_num_seqs=5,
        deterministic=deterministic,
        prefix_cache=prefix_cache,
    )
    return Engine(model, config, dtype=mx.float32)


def run(engine: Engine, sequences: list[Sequence], gap: int = 0) -> list[Said]:
    said: dict[Sequence, Said] = {s: [] for s in sequences}
    waiting = list(sequences)
    step = 0
    while waiting or not engine.idle:
        if waiting and (engine.idle or step % (gap + 1) == 0):
            engine.add(waiting.pop(0))
        step += 1
        for event in engine.step():
            if isinstance(event, Token):
                said[event.sequence].append((event.token_id, event.logprob, event.top))
    return [said[s] for s in sequences]


@pytest.mark.parametrize(
    ("name", "gaps"),
    [
        ("llama", (0, 9)),
        pytest.param("gemma3_text", (3,), marks=pytest.mark.long),
        pytest.param("qwen3_next", (3,), marks=pytest.mark.slow),
    ],
)
def test_answers_and_logprobs_are_the_same_to_the_bit_in_any_company(name, gaps):
    model = shaky_model(name)
    alone = [run(engine(model, deterministic=True, prefix_cache=False), [s])[0] for s in requests()]
    crowd = engine(model, deterministic=True)
    for gap in gaps:
        assert run(crowd, requests(), gap) == alone
    growing = [[token] for token in range(3, 6)]  # together they need more pages than there are, and with nothing to read, none waits
    alone_growing = [run(engine(model, deterministic=True, prefix_cache=False), [s])[0] for s in requests(growing, 130)]
    assert run(crowd, requests(growing, 130)) == alone_growing
    turns = [[*p, *(token for token, _, _ in said), 7, 8, 9][:170] for p, said in zip(PROMPTS, alone, strict=True)]
    alone = [run(engine(model, deterministic=True, prefix_cache=False), [s])[0] for s in requests(turns)]
    assert run(crowd, requests(turns)) == alone
    assert crowd.stats().reused_tokens > 0
    assert crowd.stats().preemptions > 0


def test_without_it_they_depend_on_the_company():
    """Otherwise the test above could not fail."""
    model = shaky_model("llama")
    alone = [run(engine(model, deterministic=False), [s])[0] for s in requests()]
    assert run(engine(model, deterministic=False), requests()) != alone
