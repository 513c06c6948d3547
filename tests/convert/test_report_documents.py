"""Documents of a conversion: a report for programs, a card for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.models.tiny_directory import tiny_directory

from mlxinfer.convert import Report, TensorReport, convert
from mlxinfer.convert import report as report_module
from mlxinfer.convert.report import base_model, model_card, report_object, tokens_to_measure

CARD = """---
license: apache-2.0
language:
- en
library_name: transformers
tags:
- chat
- mlx
---

# The original

It speaks.
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tiny_directory(tmp_path_factory.mktemp("documents") / "source", "mistral")
    (found / "README.md").write_text(CARD)
    return found


@pytest.fixture(autouse=True)
def few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "POSITIONS", 300)


def _front(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_report_accounts_for_every_tensor_and_byte(tmp_path: Path, source: Path) -> None:
    done = convert(source, tmp_path / "out", bits=4, group_size=32)
    found = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert found == json.loads(json.dumps(report_object(done)))
    assert found["bytes"] == sum(tensor["bytes"] for tensor in found["tensors"]) == done.nbytes
    assert found["bits_per_weight"] == done.bits_per_weight
    assert found["settings"]["encoder"] == "fit"
    assert {tensor["name"] for tensor in found["tensors"]} == {tensor.name for tensor in done.tensors}
    assert sum(found["tensors_by_loss"].values()) == len(found["tensors"])
    quantized = [tensor for tensor in found["tensors"] if tensor["action"] == "quantized"]
    assert quantized
    assert all(tensor["loss"] == "quantized" and 0 < tensor["error"] < 0.5 for tensor in quantized)
    body = [tensor for tensor in quantized if "layers" in tensor["name"]]
    assert all(0 < tensor["weighted_error"] < 0.5 for tensor in body)
    measured = found["quality"]
    assert measured["positions"] == 300
    assert measured["kl_mean"] > 0
    assert measured["kl_stderr"] > 0
    assert {"README.md", "quantization_report.json"} <= set(done.copied)


def test_the_card_keeps_the_licence_and_the_sources_text(tmp_path: Path, source: Path) -> None:
    done = convert(source, tmp_path / "small-4bit", bits=4, group_size=32)
    card = (tmp_path / "small-4bit" / "README.md").read_text()
    fields = _front(card)
    assert (fields["license"], fields["language"], fields["library_name"]) == ("apache-2.0", ["en"], "mlx")
    assert fields["tags"] == ["mlx", "mlxinfer", "chat"]
    assert "base_model" not in fields
    assert card.endswith("# The original\n\nIt speaks.\n")
    assert card.count("library_name") == 1
    assert f"KL divergence of the next token's probabilities {done.quality.kl:.4f}" in card
    assert "mlx_lm.generate --model ." in card
    assert "small-4bit" not in card
    assert str(tmp_path) not in card


def test_the_same_conversion_writes_the_same_documents(tmp_path: Path, source: Path) -> None:
    for name in ("a", "b"):
        convert(source, tmp_path / name, bits=4, group_size=32)
    for name in ("README.md", "quantization_report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("/cache/hub/models--org--some-model/snapshots/0123", "org/some-model", "org/some-model"),
        ("/x/y.gguf", "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("/x/mine", "mine", None),
    ],
)
def test_what_it_was_made_of(path: str, name: str, found: str | None) -> None:
    report = Report(Path(path), Path("/out"), name=name)
    assert base_model(report) == found
    assert _front(model_card(report, b"").decode()).get("base_model") == found


@pytest.mark.parametrize("card", [b"---\nlicense: [\n---\ntext\n", b"---\n- a\n---\ntext\n", b"---\n\xff: 1\n---\ntext\n", b"caf\xe9\n"])
def test_a_card_that_cannot_be_read_is_kept_whole(card: bytes) -> None:
    written = model_card(Report(Path("/x"), Path("/out"), name="x"), card)
    assert written.endswith(card)
    assert _front(written.split(b"## The model card")[0].decode())["library_name"] == "mlx"


def test_what_became_of_the_numbers() -> None:
    def loss(action: str, error: float) -> str:
        return TensorReport("w", ("w",), (2, 2), action, "4-bit", 8, error).loss  # type: ignore[arg-type]

    assert [loss("quantized", 0.0), loss("kept", 0.0), loss("cast", 0.1)] == ["exact", "exact", "rounded"]
    assert [loss("quantized", 0.1), loss("requantized", 0.1)] == ["quantized", "requantized"]


def test_large_models_are_not_measured_unless_asked() -> None:
    assert tokens_to_measure(10**6) == 300
    assert tokens_to_measure(10**13) == 0
