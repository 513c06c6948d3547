"""Traces in files: everything that is computed from a trace is the same after loading it again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.models.seeing import GOLDEN as SEEING
from support.models.seeing import cases

from mlxinfer import LLM, AsyncLLM
from mlxinfer.errors import CheckpointError, SettingError

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
EVERYTHING = ["residual", "attention", "attention_out", "mlp", "heads", "kv", "logits"]
IDS = list(range(2, 12))


@pytest.fixture(scope="module")
def llm():
    with LLM(GOLDEN / "llama", dtype="float32", max_context=256) as found:
        yield found


def test_a_trace_is_the_same_again(llm, tmp_path):
    trace = llm.trace(IDS, what=EVERYTHING)
    path = trace.save(tmp_path / "one")
    assert (path, os.listdir(tmp_path)) == (tmp_path / "one.safetensors", ["one.safetensors"])
    again = llm.load_trace(path)
    assert (again.token_ids, again.tokens, sorted(again)) == (trace.token_ids, trace.tokens, sorted(trace))
    assert repr(again.logit_lens()) == repr(trace.logit_lens())
    assert mx.array_equal(again.logit_lens().probability, trace.logit_lens().probability)
    for computed in ("surprisal", "entropy", "residual_norms"):
        assert mx.array_equal(getattr(again, computed)(), getattr(trace, computed)()), computed
    assert again.attribution() == trace.attribution()
    for layer, pair in trace["kv"].items():
        assert all(mx.array_equal(*each) for each in zip(pair, again["kv"][layer], strict=True))


def test_other_programs_read_it_by_names(llm, tmp_path):
    trace = llm.trace(IDS, layers=1, what=["residual", "kv"])
    arrays = load_file(trace.save(tmp_path / "one.safetensors"))
    assert set(arrays) == {"about", "token_ids", "residual.1", "kv.1.keys", "kv.1.values"}
    assert np.array_equal(arrays["residual.1"], np.array(trace["residual"][1]))


def test_a_trace_with_images_is_the_same_again(tmp_path):
    case = cases("smolvlm")["one"]
    with LLM(SEEING / "smolvlm", dtype="float32", max_context=1024) as llm:
        parts = [{**part, "image": case.pictures[0]} if part["type"] == "image" else part for part in case.messages[0]["content"]]
        trace = llm.trace(llm.chat_prompt([{"role": "user", "content": parts}]), layers=0, what="residual")
        again = llm.load_trace(trace.save(tmp_path / "one"))
    assert again.tokens == trace.tokens
    assert [image.size for image in again.images] == [image.size for image in trace.images]
    assert np.array_equal(again.images[0].rows, trace.images[0].rows)


def test_both_doors_read_it(llm, tmp_path):
    path = llm.trace(IDS).save(tmp_path / "one")

    async def lens():
        async with AsyncLLM(GOLDEN / "llama", dtype="float32", max_context=256) as other:
            return repr((await other.load_trace(str(path))).logit_lens())

    assert asyncio.run(lens()) == repr(llm.load_trace(path).logit_lens())


def test_another_file_is_refused(llm, tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        llm.load_trace(tmp_path / "missing.safetensors")
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"x": mx.zeros(3)})
    with pytest.raises(CheckpointError, match=r"is not a saved trace .*Trace\.save writes one"):
        llm.load_trace(tmp_path / "weights.safetensors")
    path = llm.trace(IDS).save(tmp_path / "whole")
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        llm.load_trace(tmp_path / "cut.safetensors")


def test_another_models_trace_is_refused(llm, tmp_path):
    with LLM(GOLDEN / "gemma3_text", dtype="float32", max_context=256) as other:
        path = other.trace(IDS, what=["residual", "logits"]).save(tmp_path / "gemma")
    with pytest.raises(
        SettingError, match=r"is a trace of another model \(gemma3_text, .* layers of 48 channels, 96 tokens\), not of llama"
    ):
        llm.load_trace(path)


def test_a_folder_that_does_not_exist_is_an_error(llm, tmp_path):
    with pytest.raises(SettingError, match="cannot write the trace"):
        llm.trace(IDS, layers=0, what="residual").save(tmp_path / "missing" / "one")
