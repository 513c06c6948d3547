"""GGUF files on a GPU: packed types, their dtype and size, and the user's notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from support.formats.gguf_file import Tensor, header
from support.formats.tiny_gguf import write_tiny_gguf
from support.formats.tiny_kquants import TypeOf, write_tiny_kquants
from support.kernels.on_gpu import pretend_gpu
from support.oracles.plain_step import PlainCache

from mlxinfer.engine.llm import LLM
from mlxinfer.errors import WeightsError
from mlxinfer.loading.find.resolve import ALIASES
from mlxinfer.loading.formats import compute_dtype
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.load import LoadedModel, load, prepare
from mlxinfer.nn.linear import Embedding, Linear
from mlxinfer.nn.packing import objects
from mlxinfer.nn.weights import Blocks, Dense, Format, Quantized
from mlxinfer.types import SamplingParams

GOLDEN = Path(__file__).parents[2] / "golden" / "gguf"
ALL = ("Q4_K", "Q5_K", "Q6_K")


def matrices(loaded: LoadedModel) -> list[Any]:
    return [node.matrix for node in objects(loaded.model) if isinstance(node, (Linear, Embedding))]


def forms(loaded: LoadedModel) -> set[Any]:
    return {m.weight.dtype if isinstance(m, Dense) else m.format for m in matrices(loaded)}


def logits(loaded: LoadedModel) -> np.ndarray:
    ids = mx.arange(3, 9)
    step = PlainCache(loaded.model.layers).step([(0, ids.size)])
    return np.array(loaded.model.logits(loaded.model.hidden(ids, step)).astype(mx.float32))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Mean KL divergence."""
    p, q = (x - np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=True) for x in (one, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.fixture
def kquants(tmp_path: Path) -> Path:
    return write_tiny_kquants(tmp_path / "k.gguf")


@pytest.fixture
def exact(kquants: Path) -> np.ndarray:
    return logits(load(kquants, dtype="float32"))


def test_k_quants_are_packed_and_computed_in_float16(kquants: Path, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    loaded = load(kquants)
    assert loaded.dtype == mx.float16
    assert forms(loaded) == {Format(4, 32), Format(8, 32)}
    assert {m.scales.dtype for m in matrices(loaded)} == {m.biases.dtype for m in matrices(loaded)} == {mx.float16}
    assert distance(exact, logits(loaded)) < 1e-3
    assert [note[:21].rstrip() for note in loaded.notes if "KL" in note] == ["12 Q4_K matrices are", "3 Q6_K matrices are h"]


def test_nothing_is_promoted(kquants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX computes a mixture of 16-bit dtypes in float32, and all later results too."""
    pretend_gpu(monkeypatch)
    for dtype in (mx.float16, mx.bfloat16):
        loaded = load(kquants, dtype=dtype)
        ids = mx.arange(3, 9)
        assert loaded.model.hidden(ids, PlainCache(loaded.model.layers).step([(0, ids.size)])).dtype == dtype


def test_scales_stay_float16_where_the_model_computes_in_bfloat16(
    kquants: Path, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch)
    loaded = load(kquants, dtype="bfloat16")
    assert {m.scales.dtype for m in matrices(loaded)} == {mx.float16}
    near = distance(exact, logits(loaded))
    for holder in objects(loaded.model):
        if isinstance(holder, (Linear, Embedding)):
            m = holder.matrix
            assert isinstance(m, Quantized)
            assert m.biases is not None
            holder.matrix = Quantized(m.weight, m.scales.astype(mx.bfloat16), m.biases.astype(mx.bfloat16), m.format)
    assert near < 0.5 * distance(exact, logits(loaded))


def test_float32_keeps_products_of_scales(kquants: Path, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    loaded = load(kquants, dtype="float32")
    assert {m.scales.dtype for m in matrices(loaded)} == {mx.float32}
    assert [note[:6] for note in loaded.notes if "KL" in note] == ["3 Q6_K"]


@pytest.mark.parametrize("blocks", [("Q6_K",), ALL], ids=["Q6_K", "all"])
def test_what_the_machine_multiplies_well_stays_in_blocks(
    kquants: Path, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch, blocks: tuple[str, ...]
) -> None:
    pretend_gpu(monkeypatch, blocks)
    with prepare(kquants) as prepared:
        planned = prepared.weight_bytes
        loaded = prepared.read(prepared.load_tokenizer())
    assert {m.format.mode for m in matrices(loaded) if isinstance(m, Blocks)} == set(blocks) - {"Q5_K"}
    assert planned == loaded.weight_bytes
    assert not any("Q6_K" in note for note in loaded.notes)
    assert distance(exact, logits(loaded)) < (1e-3 if len(blocks) == 1 else 1e-4)


def test_exact_unpacks_what_would_be_rounded(kquants: Path, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    loaded = load(kquants, gguf_exact=True)
    assert forms(loaded) == {mx.float16}
    assert not any("KL" in note for note in loaded.notes)
    assert distance(exact, logits(loaded)) < 1e-4
    assert distance(exact, logits(load(kquants, gguf_exact=True, dtype="float32"))) < 1e-7


def test_exact_leaves_what_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    path = write_tiny_kquants(tmp_path / "m.gguf", lambda name, layer: {"ffn_down": "Q5_0", "attn_v": "Q8_0"}.get(name, "Q5_1"))
    one, other = load(path), load(path, gguf_exact=True)
    assert forms(one) == forms(other) == {Format(5, 32), Format(8, 32)}
    assert not any("KL" in note for note in one.notes)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "IQ3_XXS"])
def test_every_type_loads_and_answers(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_kquants(tmp_path / "m.gguf", lambda name, layer: kind)
    exact = logits(load(path, dtype="float32"))
    pretend_gpu(monkeypatch)
    assert distance(exact, logits(load(path))) < 1e-2


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen3", mx.float16), ("gemma3_text", mx.bfloat16), ("gpt_oss", mx.bfloat16)],
    ids=["qwen3", "gemma", "gpt-oss"],
)
def test_architectures_that_leave_float16_compute_in_bfloat16(
    kquants: Path, architecture: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = GGUFCheckpoint(kquants)
    checkpoint.config["model_type"] = architecture
    pretend_gpu(monkeypatch)
    assert compute_dtype(checkpoint, None) == dtype
    assert compute_dtype(checkpoint, "float16") == mx.float16


def test_a_plain_file_keeps_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    assert compute_dtype(GGUFCheckpoint(GOLDEN / "llama.gguf"), None) == mx.bfloat16


def test_scales_beyond_float16_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_kquants(tmp_path / "m.gguf", lambda name, layer: "Q5_1")
    data = bytearray(path.read_bytes())
    data[-24:-22] = np.array([6e4], "<f2").tobytes()
    path.write_bytes(bytes(data))
    pretend_gpu(monkeypatch)
    load(path)  # 60,000 is still a float16
    blocks = write_tiny_kquants(tmp_path / "k.gguf", lambda name, layer: "Q4_K")
    data = bytearray(blocks.read_bytes())
    data[-144:-142] = np.array([6e4], "<f2").tobytes()
    data[-140:-128] = b"\xff" * 12
    blocks.write_bytes(bytes(data))
    with pytest.raises(WeightsError, match="leave the range of float16: load it with dtype float32"):
        load(blocks)
    load(blocks, dtype="float32")


def test_bits_still_quantize_what_is_unpacked(kquants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    loaded = load(kquants, bits=4)
    assert forms(loaded) == {Format(4, 64)}
    assert any("quantized again to 4 bits" in note for note in loaded.notes)


def test_an_engine_answers(kquants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(kquants) as llm:
        [expected] = llm.generate("ab", params)
    pretend_gpu(monkeypatch, ("Q6_K",))
    with LLM(kquants) as llm:
        assert llm.generate("ab", params)[0].token_ids[:1] == expected.token_ids[:1]
    with LLM(write_tiny_gguf(kquants.with_name("q8.gguf")), gguf_exact=True) as llm:
        assert not any("KL" in note for note in llm.notes)


LLAMA = {"attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096), "attn_output": (4096, 4096)}
LLAMA |= {"ffn_gate": (14336, 4096), "ffn_up": (14336, 4096), "ffn_down": (4096, 14336)}


def llama_8b(path: Path, type_of: TypeOf) -> Path:
    """The header of Llama 3.1 8B, and a hole of its size."""
    shapes = {"token_embd": (128256, 4096), "output": (128256, 4096), "output_norm": (4096,)}
    for layer in range(32):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in LLAMA.items()}
        shapes |= {f"blk.{layer}.{name}": (4096,) for name in ("attn_norm", "ffn_norm")}
    tensors, at = [], 0
    for name, shape in shapes.items():
        number = name.split(".")[1] if "." in name else "0"
        kind = GGMLQuantizationType[type_of(name.rpartition(".")[2], int(number)) if len(shape) > 1 else "F32"]
        tensors.append(Tensor(f"{name}.weight", shape, b"", int(kind), at))
        block, nbytes = GGML_QUANT_SIZES[kind]
        at += -(-int(np.prod(shape)) // block * nbytes // 32) * 32
    metadata = {"general.architecture": "llama", "llama.block_count": 32, "llama.context_length": 131072, "llama.embedding_length": 4096}
    metadata |= {"llama.feed_forward_length": 14336, "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8}
    metadata |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 128}
    head = header(metadata, tensors)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 32 + at)
    return path


def mixture(name: str, layer: int) -> str:
    """Q4_K_M as made by llama.cpp."""
    if name == "output":
        return "Q6_K"
    more = layer < 4 or layer >= 28 or (layer - 4) % 3 == 2
    return "Q6_K" if more and name in ("attn_v", "ffn_down") else "Q4_K"


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = llama_8b(tmp_path_factory.mktemp("8b") / "llama.gguf", mixture)
    yield path
    path.unlink()


@pytest.mark.parametrize(
    ("blocks", "exact", "least", "most"),
    [(ALL, False, 4.9e9, 4.95e9), (("Q6_K",), False, 5.2e9, 5.5e9), ((), False, 5.7e9, 5.85e9), ((), True, 15.9e9, 16.2e9)],
    ids=["all in blocks", "Q6_K in blocks", "packed", "exact without kernels"],
)
def test_memory_of_llama_8b(
    eight_billion: Path, blocks: tuple[str, ...], exact: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Q4_K_M file has 4.92 GB. Unpacked to 16 bits it would take 16 GB."""
    assert 4.9e9 < eight_billion.stat().st_size < 4.95e9
    pretend_gpu(monkeypatch, blocks)
    with prepare(eight_billion, gguf_exact=exact) as prepared:
        assert least < prepared.weight_bytes < most


@pytest.mark.model(computes=False)
@pytest.mark.parametrize("blocks", [(), ALL], ids=["packed", "blocks"])
def test_memory_of_gemma3_270m(blocks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    path = ALIASES["gemma3-270m"].find()
    if path is None:
        pytest.skip("gemma3-270m is not installed")
    pretend_gpu(monkeypatch, blocks)
    with prepare(path) as prepared:
        assert prepared.dtype == mx.bfloat16
        assert prepared.weight_bytes < 1.06 * path.stat().st_size
