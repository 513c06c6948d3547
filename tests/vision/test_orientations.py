"""Pictures of all eight EXIF orientations are seen upright."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageOps
from support.models.seeing import GOLDEN, cases

from mlxinfer import LLM


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(GOLDEN / "qwen3_vl", dtype="float32", memory_gb=1, max_context=512) as found:
        yield found


@pytest.mark.parametrize("orientation", range(1, 9))
def test_answers_are_those_about_the_upright_picture(llm: LLM, orientation: int) -> None:
    """As bytes and as a data URL; the upright picture is what Pillow makes of it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = io.BytesIO()
    Image.fromarray(cases("qwen3_vl")["one"].pictures[0]).save(stored, "PNG", exif=exif)
    data = stored.getvalue()
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    expected = llm.chat("what is this?", images=[upright], temperature=0, max_tokens=8, ignore_eos=True)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
    for found in (
        llm.chat("what is this?", images=[data], temperature=0, max_tokens=8, ignore_eos=True),
        llm.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=8, ignore_eos=True),
    ):
        assert found.token_ids == expected.token_ids
        assert found.usage.stats.image_sizes == expected.usage.stats.image_sizes
        assert found.usage.stats.reused_tokens >= 64, "equal pixels have equal keys"


def test_orientations_give_different_answers(llm: LLM) -> None:
    picture = cases("qwen3_vl")["one"].pictures[0]
    turned = [np.ascontiguousarray(each) for each in (picture, picture[:, ::-1], picture[::-1], np.rot90(picture))]
    answers = [llm.chat("what is this?", images=[each], temperature=0, max_tokens=8, logprobs=0, ignore_eos=True) for each in turned]
    assert len({tuple(round(token.logprob, 4) for token in answer.logprobs) for answer in answers}) == 4
