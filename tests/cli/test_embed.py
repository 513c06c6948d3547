from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxinfer.util.device import default_dtype

GOLDEN = Path(__file__).parent.parent / "golden" / "embeddings"
MODEL = str(GOLDEN / "last")
NEAR = 1e-5 if default_dtype() == mx.float32 else 1e-2
TOLD = json.loads((GOLDEN / "last" / "reference.json").read_text())


def rows(out: str) -> list[list[float]]:
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["index"] for one in found] == list(range(len(found)))
    return [one["embedding"] for one in found]


def test_arguments_and_lines_of_standard_input(call) -> None:
    texts = [text for text in TOLD["texts"] if text == text.strip()]
    expected = [vector for text, vector in zip(TOLD["texts"], TOLD["vectors"]["none"], strict=True) if text in texts]
    for result in (call("embed", MODEL, *texts), call("embed", MODEL, stdin="\n".join(texts) + "\n\n")):
        assert result.code == 0, result.err
        np.testing.assert_allclose(rows(result.out), expected, atol=NEAR)


def test_options(call) -> None:
    result = call("embed", MODEL, TOLD["texts"][0], "--dimensions", "8")
    np.testing.assert_allclose(rows(result.out), TOLD["first_8"][:1], atol=NEAR)
    result = call("embed", MODEL, TOLD["texts"][0], "--input-type", "query")
    np.testing.assert_allclose(rows(result.out), TOLD["vectors"]["query"][:1], atol=NEAR)


def test_what_is_wrong_is_told_in_one_line(call, chat_model) -> None:
    for arguments, says in (((chat_model, "x"), "copy modules.json"), ((MODEL, "x" * 300), "--truncate"), ((MODEL,), "no text")):
        result = call("embed", *arguments, stdin="")
        assert (result.code, result.out) == (2, "")
        assert says.replace("--", "") in result.err
