"""Models with heads of random weights, and engines that always draft with them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.models.heads import eagle3
from mlxinfer.models.heads.llama import head_plan
from mlxinfer.models.heads.mtp import Places
from mlxinfer.nn.packing import settle
from mlxinfer.nn.weights import Dense, Matrix, Recipe

from ..engines.drafting import Free
from ..engines.tiny_engine import GOLDEN
from .plain_weights import PlainWeights, RandomWeights
from .tiny_directory import tiny_directory

HEAD = {
    "model_type": "mtp_head",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


OWN_HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "glm4_moe_lite": {"num_nextn_predict_layers": 1},
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "nemotron_h": {"mtp_layers_block_type": ["full_attention", "mlp"]},
    "nemotron_h_experts": {},
}
"""Golden checkpoints whose families have heads of their own, and what their configs then say besides."""


class HeadWeights:
    """The tensors of a golden checkpoint; those that it lacks are random. `asked` are all, as the graph got them."""

    def __init__(self, name: str, head: str = "mtp.") -> None:
        self.plain = PlainWeights.open(GOLDEN / name / "model.safetensors")
        self.random = RandomWeights(tied=True)
        self.head = head

    @property
    def asked(self) -> dict[str, Matrix]:
        return self.plain.asked | self.random.asked

    def has(self, name: str) -> bool:
        return name.startswith(self.head) or self.plain.has(name)

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Many[Recipe] = (), quantizable: bool = True) -> Matrix:
        if name.startswith(self.head):
            return self.random.matrix(name, shape, quantizable=quantizable)
        return self.plain.matrix(name, shape, otherwise=otherwise, quantizable=quantizable)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Many[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        if name.startswith(self.head):
            return self.random.vector(name, shape, dtype=dtype)
        return self.plain.vector(name, shape, otherwise=otherwise, dtype=dtype)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return read | changes


def model_with_head(name: str, head: dict[str, Any] | bool = True, **changes: Any) -> tuple[Model, HeadWeights]:
    """A golden checkpoint with a head of its own (True) or one by itself, and what it was built from."""
    config = config_of(name, **changes)
    layers = config.get("num_hidden_layers", 0)
    weights = HeadWeights(name, f"model.layers.{layers}." if head is True and "num_nextn_predict_layers" in changes else "mtp.")
    return build(config, weights, settle, mtp=head), weights


ASSISTANTS = Path(__file__).parents[2] / "golden" / "assistant"


def assistant(name: str) -> Path:
    """The golden assistant for a golden Gemma 4."""
    return ASSISTANTS / name


def model_with_assistant(name: str, of: str | None = None, *, head: bool = True, **changes: Any) -> Model:
    """A golden checkpoint with the assistant of `of`, itself unless another is named. Changes of its config; those of `text_config` are
    joined with what it says."""
    tensors = dict(mx.load(str(GOLDEN / name / "model.safetensors")))
    place = assistant(of or name)
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    text = changes.pop("text_config", {})
    config |= {"text_config": config["text_config"] | text if isinstance(text, dict) else text, **changes}
    for key, tensor in mx.load(str(place / "model.safetensors")).items():
        if key.endswith("token_ordering"):
            config["token_ordering"] = tensor.tolist()
        else:
            tensors[f"mtp.{key}"] = tensor
    return build(config_of(name), PlainWeights(tensors), settle, mtp=config if head else False)


EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 96,
    "draft_vocab_size": 40,
    "hidden_size": 32,
    "target_hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
"""A drafter for models of 48 channels and three blocks."""
EAGLE3_TOKENS = [*range(1, 41)]
"""The tokens of its vocabulary; `d2t` are their distances from 0, 1, 2 and so on."""


def eagle3_directory(target: Path, config: dict[str, Any], **changes: mx.array | None) -> Path:
    """An EAGLE-3 drafter of random weights, as SpecForge writes it; tensors can be changed, and left out by None."""
    target.mkdir(parents=True)
    weights, tables = RandomWeights(tied=True), {"d2t": [1] * 40}
    layers = {"sizes": type("Sizes", (), {"hidden": config["target_hidden_size"], "vocab": config["vocab_size"], "layers": 3})}
    plan = eagle3.head_plan(config | tables, "llama", type("Target", (), layers))  # type: ignore[arg-type]
    plan.load(weights, Places(0, 1))
    tensors: dict[str, mx.array] = {}
    for name, matrix in weights.asked.items():
        assert isinstance(matrix, Dense)
        tensors[name.removeprefix("mtp.").replace("layers.0.", "midlayer.")] = matrix.weight
    tensors["d2t"] = mx.ones(40, mx.int64)
    tensors["t2d"] = mx.array([token in EAGLE3_TOKENS for token in range(config["vocab_size"])])
    whole = {**tensors, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    mx.save_safetensors(str(target / "model.safetensors"), {name: tensor for name, tensor in whole.items() if tensor is not None})
    (target / "config.json").write_text(json.dumps(config))
    return target


def engine_with(model: Model, kv: str = "16", disk: DiskStorage | None = None, **settings: int) -> Engine:
    """An engine that drafts with the model's head, whatever it costs."""
    values = {"max_context": 256, "kv_cache_tokens": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
    engine = Engine(model, EngineConfig(**values, ngrams=False), dtype=mx.float32, kv=KVFormat.parse(kv), disk=disk)
    engine.proposer.times, engine.proposer.account.share = Free(), 1e9
    if engine.proposer.draft is not None:
        engine.proposer.draft.cost = 1e-4
    return engine


class Prompter:
    """Puts the truth in the place of some of a head's drafts, so that some hold: random weights would hardly ever guess right."""

    def __init__(self, engine: Engine, answers: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        draft = engine.proposer.draft
        assert draft is not None
        self.real, self.answers, self.random = draft.propose, answers, np.random.default_rng(seed)
        draft.propose = self.propose  # type: ignore[method-assign]

    def propose(self, wanted: Iterable[tuple[Sequence, int]]) -> None:
        wanted = [(s, int(self.random.integers(1, count + 1))) for s, count in wanted]
        self.real(wanted)
        for s, _ in wanted:
            real: list[int] = [int(t) for t in s.drafts.tolist()] if not isinstance(s.drafts, list) else s.drafts
            future = self.answers[tuple(s.prompt)][len(s.tokens) - len(s.prompt) :]
            right = [future[i] if i < len(future) and self.random.random() < 0.7 else token for i, token in enumerate(real)]
            s.propose(mx.array(right, dtype=mx.uint32))


def head_directory(target: Path, config: dict[str, Any]) -> Path:
    """A head by itself, with random weights."""
    target.mkdir(parents=True)
    weights, places = RandomWeights(tied=True), Places(0, 1)
    head_plan(config, config["hidden_size"], config["vocab_size"]).load(weights, places)
    tensors = {name: matrix.weight for name, matrix in weights.asked.items() if isinstance(matrix, Dense)}
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    (target / "config.json").write_text(json.dumps(config))
    return target


def with_random_head(directory: Path, **options: Any) -> Path:
    """Qwen 3.5 with a head, as Hugging Face stores it: its norms around zero. `options` are those of `tiny_directory`."""
    tiny_directory(directory, "qwen3_5_text", **options)
    _, weights = model_with_head("qwen3_5_text", True)
    head = {name: m.weight for name, m in weights.random.asked.items() if isinstance(m, Dense)}
    stored = {name: a - 1 if a.ndim == 1 else a for name, a in head.items()}
    path = str(directory / "model.safetensors")
    mx.save_safetensors(path, dict(mx.load(path)) | stored)
    return directory
