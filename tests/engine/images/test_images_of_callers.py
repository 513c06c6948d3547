"""Images that callers give to `LLM` and `AsyncLLM`: answers equal to transformers', counts, statistics, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.models.seeing import GOLDEN, Case, cases

from mlxinfer import LLM, AsyncLLM
from mlxinfer.errors import EngineError, ImageError, PromptError
from mlxinfer.models.towers.idefics3 import Idefics3Tower

FAMILY = str(GOLDEN / "smolvlm")
NAMES = sorted(cases())
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(FAMILY, dtype="float32") as found:
        yield found


def _messages(case: Case) -> list[dict[str, Any]]:
    """The messages with their pictures as PNG files in memory."""
    pictures, messages = iter(case.pictures), json.loads(json.dumps(case.messages))
    for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
        part["image"] = _png(next(pictures))
    return messages  # type: ignore[no-any-return]


def _png(picture: Any) -> bytes:
    out = BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_transformers(llm: LLM, name: str) -> None:
    case = cases()[name]
    assert llm.chat(_messages(case), **GREEDY).token_ids == case.greedy
    assert llm.chat(case.messages, images=case.pictures, **GREEDY).token_ids == case.greedy
    prompt = llm.tokenizer.render_chat(case.messages)
    given: Any = {"prompt": prompt, "images": case.pictures}
    assert [found.token_ids for found in llm.generate([given, given], **GREEDY)] == [case.greedy] * 2
    assert [token for chunk in llm.stream(given, **GREEDY) for token in chunk.token_ids] == case.greedy
    streamed = llm.stream_chat(case.messages, images=case.pictures, **GREEDY)
    assert [token for chunk in streamed for token in chunk.token_ids] == case.greedy
    assert [found.token_ids for found in llm.generate(llm.chat_prompt(_messages(case)), n=2, **GREEDY)] == [case.greedy] * 2


def test_answers_of_an_async_model() -> None:
    async def ask() -> None:
        async with AsyncLLM(FAMILY, dtype="float32") as found:
            assert found.sees_images
            for case in cases().values():
                assert (await found.chat(_messages(case), **GREEDY)).token_ids == case.greedy
                given: Any = {"prompt": found.tokenizer.render_chat(case.messages), "images": case.pictures}
                answers = await found.generate([given, "hello"], **GREEDY)
                assert answers[0].token_ids == case.greedy
                assert await found.count_tokens(_messages(case)) == len((await found.chat_prompt(_messages(case))).token_ids)

    asyncio.run(ask())


def test_statistics_of_images(llm: LLM) -> None:
    case = cases()["two"]
    usage = llm.chat(_messages(case), **GREEDY).usage
    assert usage.stats.images == 2
    assert usage.stats.image_tokens == sum(llm.image_layout(picture).tokens for picture in case.pictures)
    assert usage.stats.image_decode_s > 0
    layouts = [llm.image_layout(_png(picture)) for picture in case.pictures]
    expected = [((each.size[1], each.size[0]), (each.resized[1], each.resized[0])) for each in layouts]
    assert list(usage.stats.image_sizes) == expected
    assert llm.chat("hello", **GREEDY).usage.stats.image_sizes == ()


def test_tokens_of_a_chat_are_counted_without_its_pictures(llm: LLM) -> None:
    case = cases()["turns"]
    damaged = _messages(case)
    for part in (part for message in damaged for part in message["content"] if part["type"] == "image"):
        part["image"] = part["image"][:-40] + bytes(40)
    assert llm.count_tokens(damaged) == llm.chat(_messages(case), **GREEDY).usage.prompt_tokens
    with pytest.raises(ImageError):
        llm.chat(damaged)


def test_chats_of_text_say_what_the_user_said(llm: LLM) -> None:
    prompt = llm.chat_prompt("describe the image in one sentence.")
    assert "describe the image" in llm.tokenizer.decode(prompt.token_ids)
    assert prompt.images is None


def test_a_conversation_goes_on_with_cached_pictures(llm: LLM) -> None:
    case = cases()["one"]
    turns = _messages(case)
    first = llm.chat(turns, **GREEDY)
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then?"}]
    later = llm.chat(turns, **GREEDY).usage.stats
    assert later.images == later.images_cached == 1
    assert later.reused_tokens > later.image_tokens


def test_only_texts_are_scored_and_embedded(llm: LLM) -> None:
    given: Any = {"prompt": "<image>", "images": [np.zeros((4, 4, 3), np.uint8)]}
    for read in (llm.score, llm.logits):
        with pytest.raises(PromptError, match="only text or token ids can be read here"):
            read(given)
    ids = llm.chat_prompt("hello", images=given["images"]).token_ids
    for read in (llm.score, llm.logits, llm.generate):
        with pytest.raises(PromptError, match="stands for an image"):
            read(ids)


def test_a_model_loaded_without_its_tower_is_blind() -> None:
    with LLM(FAMILY, dtype="float32", vision="off") as blind:
        assert not blind.sees_images
        with pytest.raises(ImageError, match=r"messages\[0\].content\[0\]: the model cannot see images: .*no-vision"):
            blind.chat(_messages(cases()["one"]))
        with pytest.raises(ImageError, match="image: the model cannot see images"):
            blind.image_layout(cases()["one"].pictures[0])
        assert blind.chat("hello", **GREEDY).token_ids


def test_a_failure_of_the_tower_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    picture = np.zeros((40, 50, 3), np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(Idefics3Tower, "stages", broken)
        with pytest.raises(EngineError, match=r"^image 1 of the prompt \(.*\) could not be encoded: .*allocate 1 bytes"):
            llm.chat("What is this?", images=[picture], **GREEDY)
    assert llm.chat("What is this?", images=[picture], **GREEDY).usage.stats.images == 1
