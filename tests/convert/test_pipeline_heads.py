"""A conversion keeps the draft head of a checkpoint, quantized like the rest, and the result drafts with it."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.heads import HEAD, head_directory, model_with_head, with_random_head
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.convert import convert
from mlxinfer.errors import DraftError
from mlxinfer.loading.load import prepare
from mlxinfer.models.decoder import Model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def drafted(model: Model) -> np.ndarray:
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=256, chunk=64)
    slot = cache.open()
    step = cache.begin([Segment(slot, 0, 9, 0, 10)])
    mx.eval(model.hidden(mx.arange(9, dtype=mx.int32), step), step.state)
    step = cache.begin([Segment(slot, 0, 1, 9, 10)])
    assert model.mtp is not None
    _, scores = model.draft(mx.array([9]), cache.states(model.mtp.places.state, [slot])[:, 0], step)
    return np.array(scores.whole(model.vocab_size))


def read(directory: Path) -> Model:
    with prepare(directory, dtype="float32", mtp=True) as prepared:
        return prepared.read(prepared.load_tokenizer()).model


IN_8_BITS = {"bits": 8, "group_size": 32}


@pytest.mark.parametrize(
    ("settings", "most"), [({}, 1e-5), (IN_8_BITS, 0.1), pytest.param(IN_8_BITS | {"encoder": "fit"}, 0.1, marks=pytest.mark.long)]
)
def test_a_converted_head_says_the_same(tmp_path: Path, settings: dict[str, object], most: float) -> None:
    source = with_random_head(tmp_path / "source")
    expected = drafted(read(source))
    assert np.abs(drafted(model_with_head("qwen3_5_text", True)[0]) - expected).max() < 1e-4
    report = convert(source, tmp_path / "out", dtype="float32", measure=False, **settings)  # type: ignore[arg-type]
    assert any(name == "mtp.fc.weight" for tensor in report.tensors for name in tensor.sources)
    assert np.abs(drafted(read(tmp_path / "out")) - expected).max() < most


def test_drafts_of_the_head_in_the_checkpoint(tmp_path: Path) -> None:
    source = with_random_head(tmp_path / "source")
    with LLM(source, dtype="float32") as plain, LLM(source, dtype="float32", draft="mtp") as drafting:
        head = sum(a.nbytes for name, a in mx.load(str(source / "model.safetensors")).items() if name.startswith("mtp."))
        assert drafting.plan.weights == plain.plan.weights + head
        assert drafting.plan.token > plain.plan.token
        assert plain.generate("Hello", GREEDY)[0].token_ids == drafting.generate("Hello", GREEDY)[0].token_ids
        assert drafting.engine.proposer.draft is not None


def test_a_head_in_a_directory_of_its_own(tmp_path: Path) -> None:
    source, head = tiny_directory(tmp_path / "model"), head_directory(tmp_path / "head", HEAD | {"draft_vocabulary": [*range(3, 90, 2)]})
    with LLM(source, dtype="float32") as plain, LLM(source, dtype="float32", draft=head) as drafting:
        own = sum(a.nbytes for a in mx.load(str(head / "model.safetensors")).values()) + 44 * 48 * 4
        assert drafting.plan.weights == plain.plan.weights + own
        assert plain.generate("Hello", GREEDY)[0].token_ids == drafting.generate("Hello", GREEDY)[0].token_ids
        assert type(drafting.engine.proposer.draft).__name__ == "HeadDrafter"


def test_heads_that_cannot_be_had_are_told(tmp_path: Path) -> None:
    source, head = tiny_directory(tmp_path / "model"), head_directory(tmp_path / "head", HEAD | {"hidden_size": 64})
    with pytest.raises(DraftError, match="no head that predicts"):
        LLM(source, draft="mtp")
    with pytest.raises(DraftError, match="64 channels"):
        LLM(source, draft=head)
    (head / "model.safetensors").unlink()
    with pytest.raises(DraftError, match="cannot be read"):
        LLM(source, draft=head)
