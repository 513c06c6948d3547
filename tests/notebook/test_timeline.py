"""Cache maps and timelines of notebooks show the real pages and steps."""

from __future__ import annotations

import itertools
import sys

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import UNMEASURED
from support.models.tiny_directory import tiny_directory
from support.processes.optional import needs

from mlxinfer import LLM, AsyncLLM, Completion, MLXInferError, SamplingParams, TokenLogprob, Usage
from mlxinfer.cache.kv_quantization import seal_keys, seal_values, unseal_keys, unseal_values
from mlxinfer.errors import SettingError
from mlxinfer.notebook import cache_errors, cache_errors_picture, cache_map, cache_picture, recorded, timeline_picture, to_pandas

PROMPT = [3 + number % 40 for number in range(150)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, context=512)


@pytest.fixture
def llm(folder):
    with LLM(folder, dtype="float32", kv="4", kv_first16=True, max_num_seqs=2, **UNMEASURED) as opened:
        yield opened


def test_pages_are_sealed_then_shared_then_kept(llm):
    first = llm.stream(PROMPT, GREEDY)
    next(first)
    held = cache_map(llm)
    (group,) = held.groups
    assert [page.state for page in group.pages] == ["sealed", "sealed"]
    assert [page.token_ids for page in group.pages] == [tuple(PROMPT[:64]), tuple(PROMPT[64:128])]
    assert group.pages[0].page < 0 <= group.pages[1].page
    assert group.pages[0].nbytes == group.open_bytes > 2 * group.pages[1].nbytes
    assert {form.name for form in group.formats} == {"4"}
    (sequence,) = held.sequences
    assert sequence.open_tokens == sequence.tokens - 128
    second = llm.stream([*PROMPT[:140], 50, 51], GREEDY)
    next(second)
    held = cache_map(llm)
    assert [page.state for page in held.groups[0].pages] == ["shared", "shared"]
    assert held.sequences[0].pages == held.sequences[1].pages
    assert held.sequences[1].reused >= 128
    first.close()
    second.close()
    held = cache_map(llm)
    assert {page.state for page in held.groups[0].pages} == {"kept"}
    assert held.sequences == ()
    assert "2 sealed pages, 0 running" in repr(held)
    assert held.nbytes == sum(page.nbytes for page in held.groups[0].pages) + held.snapshot_bytes


def test_pages_of_windows_leave(tmp_path):
    path = tiny_directory(tmp_path / "tiny", "gemma3_text", eos=False, context=512)
    with LLM(path, dtype="float32") as llm:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        held = cache_map(llm)
        stream.close()
    windows = {group.window: group for group in held.groups}
    assert None in windows
    assert len(windows) == 2
    for number, group in enumerate(held.groups):
        first = held.sequences[0].first[number]
        assert first == 0 if group.window is None else first > 0 or group.window > 100


def test_a_timeline_is_what_the_requests_report(llm):
    with recorded(llm) as timeline:
        answers = llm.generate([PROMPT, [5, 6, 7], [9, 10]], [SamplingParams(temperature=0, max_tokens=n) for n in (4, 6, 5)])
    assert llm.engine.watch is None
    requests = timeline.requests
    assert [each.prompt_tokens for each in requests] == [150, 3, 2]
    for number, (answer, request) in enumerate(zip(answers, requests, strict=True)):
        rows = [row for row in timeline.rows if row.request == number]
        assert sum(row.tokens for row in rows) == len(answer.token_ids) == request.answer_tokens
        assert sum(row.prompt for row in rows) == request.prompt_tokens - request.reused
        assert request.finish_reason == answer.finish_reason
        assert request.added <= request.started <= request.first_token <= request.last_token
    assert max(waiting for _, waiting in timeline.waiting) == 1  # two seats for three
    spans = sorted({(row.step, row.began, row.ended) for row in timeline.rows})
    assert len(spans) == timeline.steps
    assert all(before[2] <= after[1] + 1e-9 for before, after in itertools.pairwise(spans))


def test_answers_are_the_same_while_recorded(llm):
    plain = llm.generate(PROMPT, GREEDY)[0].token_ids
    with recorded(llm) as timeline, pytest.raises(MLXInferError, match="being recorded"), recorded(llm):
        pass
    with recorded(llm) as timeline:
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == plain
    assert timeline.requests[0].reused > 0


def _unsealed_keys(arrays, page):
    return unseal_keys(arrays, 4, mx.float32)


def _unsealed_values(arrays, page):
    return unseal_values(arrays, 4, page.shape[-1], mx.float32)


def test_what_a_page_loses(llm):
    trace = llm.trace(PROMPT, what="kv")
    found = cache_errors(trace, "4", first16=True)
    assert {row.page for row in found.rows} == {0, 1}
    assert all(row.keys == row.values == 0 for row in found.rows if row.page == 0)
    row = next(row for row in found.rows if (row.layer, row.page) == (1, 1))
    for one, seal, unseal, error in zip(
        trace["kv"][1], (seal_keys, seal_values), (_unsealed_keys, _unsealed_values), (row.keys, row.values), strict=False
    ):
        page = one[64:128].swapaxes(0, 1)[:, None]
        lost = np.array(unseal(seal(page, 4), page), dtype=np.float64) - np.array(page)
        assert error == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(np.array(page)), rel=1e-4)
        assert 0.01 < error < 0.5
    bits = [cache_errors(trace, kv).by_layer()[0] for kv in ("16", "8", "4", "2")]
    assert bits[0] == (0, 0)
    assert all(fewer[part] > more[part] for more, fewer in itertools.pairwise(bits) for part in (0, 1))
    with pytest.raises(SettingError, match="trace a longer one"):
        cache_errors(llm.trace(PROMPT[:63], what="kv"))


def test_pictures(llm):
    needs("matplotlib")
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    picture = cache_picture(cache_map(llm))
    assert [text.get_text() for text in picture.figure.axes[0].texts] == ["0'", "0"]
    assert picture._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(SettingError, match="no group 3"):
        cache_picture(cache_map(llm), 3)
    stream.close()
    with recorded(llm) as timeline:
        llm.generate([PROMPT, [5]], SamplingParams(temperature=0, max_tokens=2))
    assert timeline_picture(timeline)._repr_png_().startswith(b"\x89PNG")
    assert cache_errors_picture(cache_errors(llm.trace(PROMPT, what="kv")))._repr_png_().startswith(b"\x89PNG")
    with recorded(llm) as nothing:
        pass
    with pytest.raises(SettingError, match="nothing was recorded"):
        timeline_picture(nothing)


def test_tables(llm):
    needs("pandas")
    llm.generate(PROMPT, GREEDY)
    assert list(to_pandas(cache_map(llm)).columns) == ["window", "page", "number", "state", "users", "kept", "bytes"]
    with recorded(llm) as timeline:
        llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=3))
    assert to_pandas(timeline)["tokens"].sum() == 3
    assert len(to_pandas(llm.score([5, 6, 7]))) == 2
    trace = llm.trace([5, 6, 7], what="residual")
    assert len(to_pandas(trace.logit_lens())) == 3 * len(trace["residual"])
    answer = Completion("a", [1], "stop", Usage(1, 1), [TokenLogprob(1, "a", 0.0)])
    assert to_pandas(answer)["probability"].tolist() == [1.0]


def test_what_is_no_table(monkeypatch):
    with pytest.raises(SettingError, match="a int is no table"):
        to_pandas(3)
    with pytest.raises(SettingError, match="logprobs=2"):
        to_pandas(Completion("a", [1], "stop", Usage(1, 1)))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MLXInferError, match="pip install pandas"):
        to_pandas([Usage(1, 1)])


def test_an_async_model_says_what_it_cannot(folder):
    other = AsyncLLM(folder)
    for ask in (cache_map, lambda llm: recorded(llm).__enter__()):
        with pytest.raises(MLXInferError, match="needs an LLM"):
            ask(other)
    other._thread.close()
