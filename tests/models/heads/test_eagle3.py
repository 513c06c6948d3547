"""EAGLE-3 drafters compute what their definition says: the model and the drafter in NumPy and float64, without pages or steps."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN
from support.models.heads import EAGLE3, EAGLE3_TOKENS, config_of, eagle3_directory, model_with_head
from support.oracles.head_oracle import attention, llama_layer, mlp, rms, turned

from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.errors import MLXInferError
from mlxinfer.loading.load import prepare
from mlxinfer.models.heads.eagle3 import Eagle3
from mlxinfer.nn.weights import Dense

TOKENS = np.random.default_rng(3).integers(3, 96, 150).tolist()
TABLES = {"d2t": [token - i for i, token in enumerate(EAGLE3_TOKENS)]}


def drafted(model, chunks, turns=1):
    """After each piece: the rows and logits of further turns, each of which reads the next of `TOKENS`."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=1024, chunk=256)
    slot, past, found = cache.open(), 0, []
    for count in chunks:
        step = cache.begin([Segment(slot, 0, count, past, past + count)])
        mx.eval(model.hidden(mx.array(TOKENS[past : past + count], mx.int32), step), step.state)
        cache.commit(step, {slot: TOKENS})
        past += count
        row = cache.states(model.mtp.places.state, [slot])[:, 0]
        for turn in range(turns):
            step = cache.begin([Segment(slot, 0, 1, past + turn, past + turn + 1)])
            row, scores = model.draft(mx.array(TOKENS[past + turn : past + turn + 1], mx.int32), row, step)
            mx.eval(step.state)
            found.append((past, turn, np.array(row[0]), np.array(scores.whole(model.vocab_size)[0])))
    return found


def model_rows(w, tokens):
    """Return the inputs of each block of the golden Llama and the output of the last: float64 `[4, T, 48]`."""
    config = config_of("llama") | {"rope_theta": 10000.0}
    rows = [w["model.embed_tokens.weight"][tokens]]
    for layer in range(3):
        rows.append(llama_layer(w, f"model.layers.{layer}", rows[-1], config))
    return rows


def layer(w, embedded, rows, normed_residual):
    """The drafter's layer over pairs `[T, 32]` each."""
    name = "mtp.layers.0"
    token, hidden = (rms(x, w[f"{name}.{part}.weight"], 1e-6) for x, part in ((embedded, "input_layernorm"), (rows, "hidden_norm")))
    both = np.concatenate([token, hidden], -1)
    q, k, v = ((both @ w[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(both), -1, 16) for part in "qkv")
    y = attention(turned(q, 1e4, 16), turned(k, 1e4, 16), v, 16**-0.5) @ w[f"{name}.self_attn.o_proj.weight"].T
    x = (hidden if normed_residual else rows) + y
    return x + mlp(w, f"{name}.mlp", rms(x, w[f"{name}.post_attention_layernorm.weight"], 1e-6))


@pytest.mark.parametrize("normed_residual", [False, True])
@pytest.mark.parametrize("chunks", [[1, 2, 61, 40], [64, 3]])
def test_it_is_that_of_its_definition(chunks, normed_residual):
    model, weights = model_with_head("llama", EAGLE3 | TABLES | {"norm_before_residual": normed_residual})
    w = {name: np.array(m.weight, np.float64) for name, m in weights.asked.items() if isinstance(m, Dense)}
    assert isinstance(model.mtp, Eagle3)
    assert model.mtp.embedding is not None  # it has other channels than the model's
    for past, turn, row, logits in drafted(model, chunks, turns=3):
        taps = np.concatenate(model_rows(w, TOKENS[:past])[1:], -1) @ w["mtp.fc.weight"].T
        embedded = w["mtp.embed_tokens.weight"][TOKENS[1 : past + 1 + turn]]
        for _ in range(turn):  # later turns read the drafter's own rows
            taps = np.concatenate([taps, layer(w, embedded[: len(taps)], taps, normed_residual)[-1:]])
        x = layer(w, embedded, taps, normed_residual)[-1]
        np.testing.assert_allclose(row, x, atol=2e-4)
        expected = rms(x, w["mtp.norm.weight"], 1e-6) @ w["mtp.lm_head.weight"].T
        np.testing.assert_allclose(logits[EAGLE3_TOKENS], expected, atol=2e-4)
        assert np.isneginf(np.delete(logits, EAGLE3_TOKENS)).all()


def test_which_rows_it_reads():
    def taps(**changes):
        return list(model_with_head("qwen3", EAGLE3 | TABLES | changes)[0].mtp.taps)

    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert taps(eagle_config=ids) == [1, 2, 3]
    assert taps(eagle_config=None, **ids) == [0, 1, 2]
    assert taps(eagle_config={"use_aux_hidden_state": True}, **ids) == [0, 1, 2]


def test_models_without_it_take_no_rows_aside(monkeypatch):
    model, _ = model_with_head("llama", False)
    aside: list[object] = []
    monkeypatch.setattr("mlxinfer.models.decoder.BlockStack._tap", lambda self, index, x, tapped: aside.append(tapped))
    assert model.taps == ()
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=256, chunk=64)
    mx.eval(model.hidden(mx.array(TOKENS[:9], mx.int32), cache.begin([Segment(cache.open(), 0, 9, 0, 9)])))
    assert all(tapped is None for tapped in aside)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 64}, "rows of 64 channels, and the model has 48"),
        ({"target_hidden_size": None}, "rows of 32 channels, and the model has 48"),
        ({"vocab_size": 97}, "vocabulary of 97 tokens"),
        ({"num_hidden_layers": 2}, "drafters have one layer"),
        ({"eagle_config": {}}, "before the blocks 2, 1, 0, which must be three in order of the model's 3"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "before the blocks 1, 2, 4"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {"depth": 3}}, "depth"),
        ({"eagle_config": 3}, "eagle_config"),
        ({"draft_vocab_size": 41}, "41 tokens and 40 entries in d2t"),
        ({"d2t": None}, "40 tokens and no d2t"),
        ({"d2t": [0] * 39 + [57]}, "different tokens below 96"),
        ({"d2t": [1, 0] + [1] * 38}, "different tokens below 96"),
        ({"t2d": [1] * 96}, "do not name the same tokens"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"new_key": True}, "new_key"),
    ],
)
def test_one_that_does_not_fit_is_refused(change, message):
    with pytest.raises(MLXInferError, match=message):
        model_with_head("llama", EAGLE3 | TABLES | change)


def test_directories_are_recognized_and_checked_before_weights_are_read(tmp_path: Path):
    def told(config=EAGLE3, cut=0, **changes):
        shutil.rmtree(tmp_path / "drafter", ignore_errors=True)
        place = eagle3_directory(tmp_path / "drafter", config, **changes)
        file = place / "model.safetensors"
        if cut:
            file.write_bytes(file.read_bytes()[:-cut])
        try:
            with prepare(GOLDEN / "llama", mtp=place) as found:
                assert isinstance(found.model.mtp, Eagle3)
                return ""
        except MLXInferError as error:
            return str(error)

    assert not told()
    assert not told(EAGLE3 | {"architectures": ["LlamaForCausalLM"]})
    wrong = [
        told(cut=50),
        told(fc__weight=None),
        told(fc__weight=mx.zeros((32, 96))),
        told(midlayer__hidden_norm__weight=None),
        told(d2t=None),
        told(d2t=mx.ones(40)),
        told(t2d=mx.ones(96, mx.bool_)),
        told(extra__weight=mx.zeros(3)),
        told(mask_hidden=mx.zeros(3)),
    ]
    expected = ["drafter", "fc.weight is missing", "fc.weight has shape [32, 96], expected [32, 144]", "layers.0.hidden_norm.weight is"]
    expected += ["no d2t", "d2t must be a list of whole numbers", "do not name the same tokens", "extra.weight is", "mask_hidden is"]
    for message, part in zip(wrong, expected, strict=True):
        assert part in message
        assert "\n" not in message


def test_speculators_form(tmp_path: Path):
    """The layer's config apart, and blocks counted by what enters them."""
    place = eagle3_directory(tmp_path / "drafter", EAGLE3)
    apart = ("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config")
    config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 40, "target_hidden_size": 48}
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "speculators_config": {"algorithm": "eagle3"}}
    config["transformer_layer_config"] = {key: value for key, value in EAGLE3.items() if key not in apart}
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(MLXInferError, match="norm_before_residual must be given"), prepare(GOLDEN / "llama", mtp=place):
        pass
    (place / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    with prepare(GOLDEN / "llama", mtp=place) as found:
        assert (found.model.mtp.adds_normed, found.model.mtp.taps) == (True, [1, 2, 3])
