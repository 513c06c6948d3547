"""Prompts with images: tokens equal to transformers', the places of images, and what is refused, without a model's weights."""

from __future__ import annotations

import json
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlxinfer.engine.request_keywords import RequestOptions
from mlxinfer.engine.text.chat_prompt import ChatPrompt, continued
from mlxinfer.engine.text.image_inputs import ImageCache, prepare
from mlxinfer.engine.text.input_processor import InputProcessor, TokensWithImages
from mlxinfer.errors import ContextLengthError, ImageError, PromptError
from mlxinfer.structured_output.grammar import GrammarCompiler
from mlxinfer.tokenizer.tokenizer import from_directory
from mlxinfer.types import SamplingParams
from mlxinfer.vision.families import open_processor
from mlxinfer.vision.picture import read_picture
from mlxinfer.vision.processor import Budget

GOLDEN = Path(__file__).parents[2] / "golden" / "vision"
FAMILIES = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/reference.npz")))
REASON = "the model cannot see images: it is a text model"


def _cases() -> list[tuple[str, str]]:
    found = []
    for family in FAMILIES:
        with np.load(GOLDEN / family / "reference.npz", allow_pickle=False) as reference:
            found += [(family, case) for case in json.loads(str(reference["cases"]))]
    return found


def _case(family: str, case: str) -> dict[str, Any]:
    with np.load(GOLDEN / family / "reference.npz", allow_pickle=False) as reference:
        return {name.removeprefix(f"{case}_"): reference[name] for name in reference.files if name.startswith(f"{case}_")}


@cache
def inputs(family: str, *, blind: bool = False, context: int = 100_000, budget: Budget = Budget()) -> InputProcessor:  # noqa: B008
    tokenizer = from_directory(GOLDEN / family)
    vision = REASON if blind else open_processor(GOLDEN / family)
    config = json.loads((GOLDEN / family / "config.json").read_text())
    vocab = config.get("text_config", config)["vocab_size"]
    params = SamplingParams(temperature=0.0).resolved()
    return InputProcessor(tokenizer, vocab, context, params, GrammarCompiler(tokenizer, vocab), vision=vision, budget=budget)


def _picture(seed: int = 0, size: tuple[int, int] = (60, 90)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def _png(seed: int = 0, size: tuple[int, int] = (60, 90)) -> bytes:
    out = BytesIO()
    Image.fromarray(_picture(seed, size)).save(out, "PNG")
    return out.getvalue()


def _asked(*images: Any, text: str = "what is this?", role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]}]


@pytest.mark.parametrize(("family", "case"), _cases())
def test_tokens_are_those_of_transformers(family: str, case: str) -> None:
    values = _case(family, case)
    images = iter([values[name] for name in sorted(values) if name.startswith("image_") and name[6:].isdecimal()])
    messages = json.loads(str(values["messages"]))
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = next(images)
    prompt = inputs(family).chat(messages)
    assert prompt.token_ids == values["input_ids"].tolist()
    token = inputs(family).vision.image_token_id  # type: ignore[union-attr]
    assert (0 if prompt.images is None else prompt.images.tokens) == prompt.token_ids.count(token)
    (sequence,) = inputs(family).sequences(prompt, None, RequestOptions())
    assert sequence.images is prompt.images
    keys = list(sequence.keys())
    assert [key for key, known in zip(keys, prompt.token_ids, strict=True) if known != token] == [t for t in prompt.token_ids if t != token]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_may_be_given_apart(family: str) -> None:
    wanted = inputs(family).chat(_asked(_picture(), _picture(1), text="hello"))
    apart = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "hello"}]
    for found in (
        inputs(family).chat("hello", images=[_picture(), _picture(1)]),
        inputs(family).chat([{"role": "user", "content": "hello"}], images=(_picture(), _picture(1))),
        inputs(family).chat([{"role": "user", "content": apart}], images=[_picture(), _picture(1)]),
        inputs(family).chat(_asked(_picture(1), text="hello"), images=[_picture()]),
    ):
        assert found.token_ids == wanted.token_ids
        assert found.images
        assert wanted.images
        assert found.images.keys == wanted.images.keys


def test_every_form_of_a_source_gives_the_same_image(tmp_path: Path) -> None:
    from base64 import b64encode

    data, file = _png(), tmp_path / "a picture.png"
    file.write_bytes(data)
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    sources = (data, bytearray(data), str(file), file, file.as_uri(), url, _picture(), Image.fromarray(_picture()), read_picture(data))
    prompts = [inputs("smolvlm").chat(_asked(source)) for source in sources]
    for part in ({"url": url}, {"url": url, "detail": "auto"}, url):
        prompts.append(
            inputs("smolvlm").chat([{"role": "user", "content": [{"type": "image_url", "image_url": part}, *_asked()[0]["content"]]}])
        )
    assert len({tuple(prompt.images.keys) for prompt in prompts if prompt.images}) == 1
    assert all(prompt.images for prompt in prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_pictures_have_two_keys(family: str) -> None:
    one, two = (inputs(family).chat(_asked(_png(seed))) for seed in (0, 1))
    assert one.token_ids == two.token_ids
    a, b = (inputs(family).sequences(prompt, None, RequestOptions())[0].keys() for prompt in (one, two))
    token = inputs(family).vision.image_token_id  # type: ignore[union-attr]
    assert [x != y for x, y in zip(a, b, strict=True)] == [known == token for known in one.token_ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_a_chat_survives_in_every_form(family: str) -> None:
    prompts = [
        inputs(family).chat(given) for given in ("Hello there", _asked(text="Hello there"), [{"role": "user", "content": "Hello there"}])
    ]
    assert {tuple(prompt.token_ids) for prompt in prompts} == {tuple(prompts[0].token_ids)}
    assert "Hello there" in inputs(family).tokenizer.decode(prompts[0].token_ids)
    assert prompts[0].images is None
    turns = [*_asked(text="one"), {"role": "assistant", "content": "two"}, *_asked(text="three")]
    found = inputs(family).chat(turns)
    text = inputs(family).tokenizer.decode(found.token_ids)
    assert text.index("one") < text.index("two") < text.index("three")
    assert 0 < found.settled < len(found.token_ids)


def test_settled_tokens_count_after_expansion() -> None:
    short, long = inputs("smolvlm").chat("what is this?"), inputs("smolvlm").chat(_asked(_picture()))
    assert long.settled - short.settled == len(long.token_ids) - len(short.token_ids) > 30


@pytest.mark.parametrize("family", FAMILIES)
def test_spelled_placeholders_stay_text(family: str) -> None:
    processor = inputs(family).vision
    assert not isinstance(processor, str)
    spelled = f"a {processor.placeholder} b {processor.image_token} c"
    prompt = inputs(family).chat(_asked(_picture(), text=spelled))
    assert prompt.images
    assert prompt.token_ids.count(processor.image_token_id) == prompt.images.tokens
    assert spelled in inputs(family).tokenizer.decode(prompt.token_ids)
    assert spelled in inputs(family).tokenizer.decode(inputs(family).chat(spelled).token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_of_tools_may_have_images(family: str) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    result = [{"type": "text", "text": "the screen:"}, {"type": "image", "image": _picture()}]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": result},
    ]
    prompt = inputs(family).chat(messages)
    assert prompt.images
    assert prompt.images.tokens == prompt.token_ids.count(inputs(family).vision.image_token_id)  # type: ignore[union-attr]
    assert "the screen:" in inputs(family).tokenizer.decode(prompt.token_ids[: prompt.images.runs[0].start])


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_of_plain_prompts(family: str) -> None:
    chat = inputs(family).chat(_asked(_picture(), _picture(1)))
    processor = inputs(family).vision
    assert chat.images
    assert not isinstance(processor, str)
    with pytest.raises(PromptError, match="stands for an image: give the images with it"):
        inputs(family).prepared(chat.token_ids)
    text = f"one {processor.placeholder} two {processor.placeholder}"
    found = inputs(family).prepared({"prompt": text, "images": [_picture(), _picture(1)]})
    assert isinstance(found, TokensWithImages)
    assert [image.digest for image in found.images.images] == [image.digest for image in chat.images.images]
    given = inputs(family).prepared({"prompt": found.token_ids, "images": [_picture(), _picture(1)]})
    assert isinstance(given, TokensWithImages)
    assert given.images.keys == found.images.keys
    for images in ([_picture()], [_picture()] * 3):
        with pytest.raises(PromptError, match="the prompt has 2 image placeholders"):
            inputs(family).prepared({"prompt": text, "images": images})
        with pytest.raises(PromptError, match="image rows"):
            inputs(family).prepared({"prompt": found.token_ids, "images": images})
    with pytest.raises(PromptError, match="for generate, stream, chat and trace"):
        inputs(family).scored_ids({"prompt": text, "images": [_picture()]})  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="a prompt with images is"):
        inputs(family).prepared({"prompt": text, "image": [_picture()]})  # type: ignore[typeddict-unknown-key, typeddict-item]


def _content(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "x"}, {"role": "user", "content": list(parts)}]


_TEXT = {"type": "text", "text": "hello"}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": b"no picture"}, "this is not an image of a supported format"),
        ({"type": "image", "image": _png()[:200]}, "truncated"),
        ({"type": "image", "image": "/nowhere/x.png"}, "cannot be read"),
        ({"type": "image", "image": "https://example.com/x.png"}, "not fetched"),
        ({"type": "image"}, '"image" is missing'),
        ({"type": "image", "image": 3}, "not int"),
        ({"type": "image", "image": _picture().astype(np.float32)}, "must be uint8"),
        ({"type": "image", "image": _png(), "detail": "ultra"}, "must be auto, low or high"),
        ({"type": "image", "image": _png(), "max_pixels": 0}, "max_pixels is 0"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "a URL other than data:"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "file: URLs are not fetched"),
        ({"type": "image_url", "image_url": {}}, '"image_url" must be'),
        ({"type": "video", "video": "x.mp4"}, "'video': only text and images"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio': only text and images"),
        ({"type": "text"}, '"text" must be a text'),
        ("hello", "is a str, and must be a part"),
    ],
)
def test_errors_name_the_part(part: Any, message: str) -> None:
    with pytest.raises(PromptError, match=r"^messages\[1\]\.content\[1\]") as caught:
        inputs("smolvlm").chat(_content(_TEXT, part))
    assert message in str(caught.value)


def test_blind_models_say_why() -> None:
    with pytest.raises(ImageError, match=rf"^messages\[1\]\.content\[0\]: {REASON}$"):
        inputs("smolvlm", blind=True).chat(_content({"type": "image", "image": _png()}))
    with pytest.raises(ImageError, match=r"^images\[0\]: the model cannot see images"):
        inputs("smolvlm", blind=True).chat("hello", images=[_png()])
    with pytest.raises(ImageError, match=r"^images\[0\]: the model cannot see images"):
        inputs("smolvlm", blind=True).prepared({"prompt": "<image>", "images": [_png()]})
    assert inputs("smolvlm", blind=True).chat("hello").token_ids == inputs("smolvlm").chat("hello").token_ids


def test_images_must_be_a_list_of_few_with_a_place() -> None:
    for single in (_png(), "x.png", _picture(), Image.fromarray(_picture()), {"image": _png()}):
        with pytest.raises(ImageError, match="images must be a list"):
            inputs("smolvlm").chat("hello", images=single)
    with pytest.raises(ImageError, match="no user message"):
        inputs("smolvlm").chat([{"role": "assistant", "content": "hello"}], images=[_png()])
    with pytest.raises(ImageError, match=r"images\[64\]: a request may have 64 images, not 65"):
        inputs("smolvlm").chat("hello", images=[_png()] * 65)
    with pytest.raises(ImageError, match=r"2 images are given for 1 parts"):
        inputs("smolvlm").chat([{"role": "user", "content": [{"type": "image"}]}], images=[_png()] * 2)


def test_the_context_error_counts_the_images() -> None:
    prompt = inputs("smolvlm").chat(_asked(_png(), _png(1)))
    assert prompt.images
    with pytest.raises(
        ContextLengthError, match=rf"the prompt has {len(prompt.token_ids)} tokens, {prompt.images.tokens} of them for 2 images"
    ):
        inputs("smolvlm", context=len(prompt.token_ids)).chat(_asked(_png(), _png(1)))


def test_a_long_prompt_is_refused_before_its_pictures_are_decoded() -> None:
    data = bytearray(_png())
    data[-60:-40] = bytes(20)  # only decoding finds this
    with pytest.raises(ContextLengthError):
        inputs("smolvlm", context=20).chat(_asked(bytes(data)))
    with pytest.raises(ImageError, match=r"messages\[0\]\.content\[0\]"):
        inputs("smolvlm").chat(_asked(bytes(data)))


def test_tokens_are_counted_without_decoding() -> None:
    data = bytearray(_png())
    data[-60:-40] = bytes(20)
    rendered = inputs("smolvlm").rendered(_asked(bytes(data)))
    assert rendered.prompt.token_ids == inputs("smolvlm").chat(_asked(_png())).token_ids
    assert [image.layout.tokens for image in rendered.images] == [rendered.prompt.token_ids.count(inputs("smolvlm").vision.image_token_id)]  # type: ignore[union-attr]


def test_limits_of_an_image_stay_within_those_of_all() -> None:
    def seen(budget: Budget, **limits: Any) -> tuple[int, int]:
        part = {"type": "image", "image": _picture(0, (200, 200)), **limits}
        prompt = inputs("qwen3_vl", budget=budget).chat([{"role": "user", "content": [part]}])
        assert prompt.images
        return prompt.images.sizes[0][1]

    whole, small = seen(Budget()), seen(Budget(max_pixels=10_000))
    assert whole == seen(Budget(max_pixels=130_000), max_pixels=10_000_000)
    assert small == seen(Budget(max_pixels=10_000), max_pixels=1_000_000) == seen(Budget(), max_pixels=10_000) < whole
    assert seen(Budget(min_pixels=90_000)) == seen(Budget(), min_pixels=90_000) > whole
    assert seen(Budget(max_pixels=10_000), min_pixels=90_000) == small


def test_images_are_prepared_once() -> None:
    first, again = inputs("smolvlm").chat(_asked(_png(7))), inputs("smolvlm").chat([*_asked(_png(7)), *_asked(_png(7), _png(8))])
    assert first.images
    assert again.images
    assert again.images.images[0] is again.images.images[1] is first.images.images[0]
    assert again.images.images[2] is not first.images.images[0]
    assert first.images.prepare_s > 0
    other = inputs("smolvlm").chat([{"role": "user", "content": [{"type": "image", "image": _png(7), "detail": "low"}]}])
    assert other.images
    assert other.images.images[0] is not first.images.images[0]


def test_the_cache_of_images_is_bounded() -> None:
    processor = open_processor(GOLDEN / "smolvlm")
    planned = inputs("smolvlm").rendered(_asked(*(_png(seed) for seed in range(3)))).images
    size = prepare(planned[0], processor, ImageCache(0)).pixels.values.nbytes
    small = ImageCache(2 * size)
    one, two = (prepare(each, processor, small) for each in planned[:2])
    assert prepare(planned[0], processor, small) is one
    prepare(planned[2], processor, small)
    assert prepare(planned[0], processor, small) is one
    assert prepare(planned[1], processor, small) is not two
    nothing = ImageCache(size - 1)
    assert prepare(planned[0], processor, nothing) is not prepare(planned[0], processor, nothing)


def test_a_continued_answer_keeps_the_images() -> None:
    for family in FAMILIES:
        tokenizer = inputs(family).tokenizer
        prompt: ChatPrompt = inputs(family).chat(_asked(_picture()))
        longer = continued(prompt, tokenizer, "It is a cat")
        assert longer.images
        assert prompt.images
        assert len(longer.images.keys) == len(longer.token_ids) > len(prompt.token_ids)
        assert longer.images.images == prompt.images.images
        (sequence,) = inputs(family).sequences(longer, None, RequestOptions())
        assert list(sequence.keys())[len(prompt.token_ids) :] == longer.token_ids[len(prompt.token_ids) :]


def test_positions_of_a_continued_prompt_go_on() -> None:
    from mlxinfer.vision.inputs import PromptImages

    prompt = inputs("qwen3_vl").chat(_asked(_picture()))
    token = inputs("qwen3_vl").vision.image_token_id  # type: ignore[union-attr]
    assert prompt.images
    short = PromptImages.of(prompt.token_ids, prompt.images.images, token, mrope=True, spans=False)
    whole = PromptImages.of([*prompt.token_ids, 5, 6, 7], prompt.images.images, token, mrope=True, spans=False)
    longer = short.followed_by([5, 6, 7])
    assert longer.rope is not None
    assert np.array_equal(longer.rope, whole.rope)  # type: ignore[arg-type]
    assert (longer.shift, longer.keys) == (whole.shift, whole.keys)
