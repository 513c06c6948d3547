"""MTP heads compute their definition, in any steps and pages."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.models.heads import HEAD, OWN_HEADS, config_of, model_with_head
from support.oracles.head_oracle import latent_layer, llama_layer, nemotron_layer, pairs, qwen_layer, rms

from mlxinfer import kernels_cpu
from mlxinfer.cache.base import Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.errors import DraftError, MLXInferError
from mlxinfer.nn.weights import Dense

QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")
TOKENS = np.random.default_rng(3).integers(3, 96, 150).tolist()


def tensors(weights):
    return {name: np.array(m.weight, np.float64) for name, m in weights.asked.items() if isinstance(m, Dense)}


def drafted(model, chunks, kv="16"):
    """For each number of tokens that a piece ends at: the head's row and logits for the next token, and the model's rows of all tokens, as
    the head reads them."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=1024, chunk=256, kv=KVFormat.parse(kv))
    slot, past, found, hidden = cache.open(), 0, [], []
    for count in chunks:
        step = cache.begin([Segment(slot, 0, count, past, past + count)])
        rows = model.hidden(mx.array(TOKENS[past : past + count], mx.int32), step)
        hidden.append(np.array(model.norm(rows) if model.mtp.normed and not model.joined else rows, np.float64))
        mx.eval(step.state)
        cache.commit(step, {slot: TOKENS})
        past += count
        step = cache.begin([Segment(slot, 0, 1, past, past + 1)])
        before = cache.states(model.mtp.places.state, [slot])[:, 0]
        row, scores = model.draft(mx.array(TOKENS[past : past + 1], mx.int32), before, step)
        found.append((past, np.array(row[0]), np.array(scores.whole(model.vocab_size)[0])))
        mx.eval(step.state)
    return found, np.concatenate(hidden)


def embedded(w, tokens):
    return w["model.embed_tokens.weight"][tokens]


@pytest.mark.parametrize("chunks", [[1, 1, 2, 58, 3, 70], [64, 64], [63, 1, 65]])
@pytest.mark.parametrize("normed", [True, False])
def test_the_head_of_a_qwen_is_that_of_its_definition(chunks, normed):
    model, weights = model_with_head("qwen3_5_text", True)
    if not normed:
        model.mtp = type(model.mtp)(**{f: getattr(model.mtp, f) for f in model.mtp.__slots__} | {"normed": False})
    found, hidden = drafted(model, chunks)
    w, config = tensors(weights), config_of("qwen3_5_text")
    for past, row, logits in found:
        x = pairs(w, QWEN, embedded(w, TOKENS[: past + 1]), np.concatenate([hidden[:past], hidden[:1]]), 1e-6)
        x = qwen_layer(w, "mtp.layers.0", x, config)
        y = rms(x, w["mtp.norm.weight"], 1e-6)
        np.testing.assert_allclose(logits, y[-1] @ w["lm_head.weight"].T, atol=2e-4)
        np.testing.assert_allclose(row, (y if normed else x)[-1], atol=2e-4)


@pytest.mark.parametrize("chunks", [[1, 2, 61, 70], [64, 65]])
def test_the_head_of_a_glm_is_that_of_its_definition(chunks):
    model, weights = model_with_head("glm4_moe_lite", True, num_nextn_predict_layers=1)
    found, hidden = drafted(model, chunks)
    w, config, name = tensors(weights), config_of("glm4_moe_lite"), "model.layers.2"
    names = tuple(f"{name}.{part}" for part in ("enorm", "hnorm", "eh_proj"))
    for past, row, logits in found:
        x = pairs(w, names, embedded(w, TOKENS[: past + 1]), np.concatenate([hidden[:past], hidden[:1]]), 1e-5)
        x = latent_layer(w, name, x, config)[-1]
        np.testing.assert_allclose(row, x, atol=2e-4)
        np.testing.assert_allclose(logits, rms(x, w[f"{name}.shared_head.norm.weight"], 1e-5) @ w["lm_head.weight"].T, atol=2e-4)


@pytest.mark.parametrize("chunks", [[1, 2, 61, 70], [64, 65]])
def test_the_head_of_a_nemotron_is_that_of_its_definition(chunks):
    model, weights = model_with_head("nemotron_h", True, mtp_layers_block_type=["full_attention", "mlp"])
    found, hidden = drafted(model, chunks)
    w, names = tensors(weights), tuple(f"mtp.layers.0.{part}" for part in ("enorm", "hnorm", "eh_proj"))
    for past, row, logits in found:
        table = w["backbone.embeddings.weight"][TOKENS[: past + 1]]
        x = pairs(w, names, table, np.concatenate([hidden[:past], hidden[:1]]), 1e-5)
        y = rms(nemotron_layer(w, x, config_of("nemotron_h")), w["mtp.layers.1.final_layernorm.weight"], 1e-5)[-1]
        np.testing.assert_allclose(row, y, atol=2e-4)
        np.testing.assert_allclose(logits, y @ w["lm_head.weight"].T, atol=2e-4)


@pytest.mark.parametrize("kv", ["16", "4"])
@pytest.mark.parametrize("chunks", [[1, 2, 58, 3, 70], [64, 64]])
def test_a_head_by_itself_joins_the_first_token_with_zeros(chunks, kv):
    model, weights = model_with_head("llama", HEAD)
    found, hidden = drafted(model, chunks, kv)
    w = tensors(weights)
    for past, row, logits in found:
        tokens = [0, *TOKENS[: past + 1]]
        x = pairs(w, QWEN, embedded(w, tokens), np.concatenate([np.zeros_like(hidden[:1]), hidden[:past], hidden[:1]]), 1e-6)
        y = rms(llama_layer(w, "mtp.layers.0", x, HEAD), w["mtp.norm.weight"], 1e-6)[-1]
        if kv == "16" or past < 64:
            np.testing.assert_allclose(row, y, atol=2e-4)
            np.testing.assert_allclose(logits, y @ w["lm_head.weight"].T, atol=2e-4)
        else:  # the first page is sealed in 4 bits
            assert 1e-4 < np.abs(row - y).max() < 0.3


@pytest.mark.skipif(not kernels_cpu.can_run_blocks(), reason="needs the CPU kernels")
def test_one_operation_for_a_layer_does_what_several_do():
    chunks = [1, 2, 58, 3, 70]
    (native, _), (plain, _) = (model_with_head("llama", HEAD) for _ in range(2))
    assert native.mtp.native is not None
    plain.mtp = replace(plain.mtp, native=None)
    for (_, row, logits), (_, expected, scores) in zip(drafted(native, chunks)[0], drafted(plain, chunks)[0], strict=True):
        np.testing.assert_allclose(row, expected, atol=2e-5)
        np.testing.assert_allclose(logits, scores, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])
def test_pages_that_leave_out_the_first_token_are_for_plain_operations(name):
    model, _ = model_with_head(name, True, **OWN_HEADS[name])
    assert model.mtp.native is None


def test_a_vocabulary_of_its_own():
    whole, _ = model_with_head("llama", HEAD)
    some, _ = model_with_head("llama", HEAD | {"draft_vocabulary": list(range(5, 96, 3))})
    (_, row, logits), (_, same, few) = (drafted(model, [7])[0][0] for model in (whole, some))
    np.testing.assert_allclose(row, same, atol=1e-6)
    np.testing.assert_allclose(few[5::3], logits[5::3], atol=1e-5)
    assert np.isneginf(few[:5]).all()
    assert np.isneginf(few[6::3]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "rows of 64 channels, and the model has 48"),
        ({"vocab_size": 97}, "vocabulary of 97 tokens"),
        ({"num_hidden_layers": 2}, "heads have one layer"),
        ({"draft_vocabulary": [3, 2]}, "ascending token ids"),
        ({"sliding_window": 7}, "sliding_window"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(change, message):
    with pytest.raises(MLXInferError, match=message):
        model_with_head("llama", HEAD | change)


def test_a_checkpoint_without_a_head_is_told():
    with pytest.raises(DraftError, match="no head that predicts several tokens"):
        model_with_head("llama", True)
