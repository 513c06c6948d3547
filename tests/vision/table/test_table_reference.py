"""Each family gives transformers' prompts, pixels, features, logits and answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from support.models.seeing import GOLDEN, cases, seeing, seeing_engine
from support.vision.table import STRIDE, array, error, limit, logits_in, messages_with_pictures, prompt, sees

from mlxinfer import LLM


@sees("pixels")
def test_pixels(name: str) -> None:
    """Equal to the bit to the Pil image processors; to stored ones for families without such a class."""
    compared = 0
    for case, found in cases(name).items():
        images = [image.pixels for image in prompt(name, case).images.images] if found.pictures else []
        codes, digest = array(name, f"{case}_pixel_codes"), array(name, f"{case}_pixels")
        if codes is not None:
            assert np.array_equal(np.concatenate([pixels.values.reshape(-1) for pixels in images]), codes)
        elif digest is not None:
            assert hashlib.sha256(b"".join(pixels.normalized().tobytes() for pixels in images)).hexdigest() == str(digest)
        compared += len(images)
    assert compared >= 5


@sees("prompt")
def test_prompts_and_ids(name: str) -> None:
    with LLM(GOLDEN / name, dtype="float32", memory_gb=1, max_context=512) as llm:
        for case in cases(name):
            asked = llm.chat_prompt(messages_with_pictures(name, case))
            assert asked.token_ids == array(name, f"{case}_input_ids").tolist(), case


@sees("tower")
def test_features(name: str) -> None:
    for case in ("one", "two"):
        images, expected = prompt(name, case).images.images, array(name, f"{case}_features")
        encoded = [seeing(name).vision.tower.features(mx.array(image.pixels.normalized()), image.layout.pieces) for image in images]
        found = np.concatenate([np.array(each.features) for each in encoded])
        assert error(found, expected) < 2e-5 * np.abs(expected).max()
        deepstack = array(name, f"{case}_deepstack")
        assert len(encoded[0].deepstack) == (0 if deepstack is None else len(deepstack))
        for layer, rows in enumerate(() if deepstack is None else deepstack):
            mine = np.concatenate([np.array(each.deepstack[layer]) for each in encoded])
            assert error(mine, rows) < 2e-5 * np.abs(rows).max()


@sees("logits")
def test_logits(name: str, record_property: Callable[[str, object], None]) -> None:
    """Of every row, through the engine."""
    worst = 0.0
    for case in ("one", "two"):
        expected = array(name, f"{case}_logits")
        worst = max(worst, error(logits_in(seeing_engine(name), prompt(name, case))[:, ::STRIDE], expected))
        assert worst < limit(name, expected), case
    record_property("error", worst)


@sees("greedy answers")
def test_greedy_answers(name: str) -> None:
    """Of one and two images, of several turns and without any: 16 tokens and their probabilities, as a user gets them."""
    with LLM(GOLDEN / name, dtype="float32", memory_gb=1, max_context=512) as llm:
        for case, found in cases(name).items():
            answer = llm.chat(messages_with_pictures(name, case), temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
            assert answer.token_ids == found.greedy, case
            expected = array(name, f"{case}_logprobs")
            assert error(np.array([each.logprob for each in answer.logprobs]), expected) < max(limit(name, expected), 5e-4), case
