from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.models.seeing import GOLDEN
from support.models.tiny_directory import tiny_directory
from support.processes.notebook_kernel import Cell, notebook_kernel
from support.processes.optional import needs

from mlxinfer import LLM, AsyncLLM, MLXInferError, SamplingParams
from mlxinfer.errors import PromptError
from mlxinfer.notebook import stream

needs("ipykernel")

PARAMS = SamplingParams(temperature=0, max_tokens=12)
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "SamplingParams(temperature=0, max_tokens=90_000, logprobs=1)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "long", eos=False, context=100_000))


def test_outside_of_a_notebook_it_prints(model, capsys):
    with LLM(model) as llm:
        for prompt, expected in ((HELLO, llm.chat(HELLO, PARAMS)), ("hello", llm.generate("hello", PARAMS)[0])):
            completion = stream(llm, prompt, PARAMS)
            assert (completion.text, completion.token_ids, completion.finish_reason) == (expected.text, expected.token_ids, "length")
            assert capsys.readouterr().out == expected.text + "\n"


def test_errors_are_those_of_the_library(model):
    with LLM(model) as llm, pytest.raises(PromptError):
        stream(llm, "", PARAMS)


@pytest.fixture(scope="module")
def cell(model: str) -> Iterator[Cell]:
    with notebook_kernel() as cell:
        cell.run(f"from mlxinfer import LLM, SamplingParams\nfrom mlxinfer.notebook import stream\nllm = LLM({model!r})\nhello = {HELLO!r}")
        yield cell


def test_the_display_ends_with_the_whole_text(cell):
    text = cell.run("c = stream(llm, hello, SamplingParams(temperature=0, max_tokens=12)); print(c.text)")
    assert cell.last_display["text/plain"] == text
    assert "12 tokens" in cell.last_display["text/html"]


def test_interrupting_the_cell_stops_the_answer_and_keeps_its_text(cell):
    cell.run(f"c = stream(llm, hello, {ENDLESS})", interrupt_after=20)
    counts = "len(c.token_ids), c.usage.completion_tokens, len(c.logprobs)"
    told = cell.run(f"print(c.finish_reason, {counts}, llm.engine.scheduler.idle); print(c.text)")
    facts, text = told.split("\n")
    reason, count, used, logprobs, nothing_runs = facts.split()
    assert (reason, nothing_runs) == ("cancelled", "True")
    assert 20 <= int(count) == int(used) == int(logprobs) < 90_000
    assert len(text) >= 20
    assert cell.last_display["text/plain"].rstrip() == text  # what a cell prints comes back without the spaces at its end
    assert "stopped" in cell.last_display["text/html"]


def test_after_an_interrupt_the_next_cell_answers_as_before(cell):
    greedy = "SamplingParams(temperature=0, max_tokens=12)"
    before = cell.run(f"print(stream(llm, hello, {greedy}).token_ids)")
    cell.run(f"stream(llm, hello, {ENDLESS});", interrupt_after=1)
    assert cell.run(f"print(stream(llm, hello, {greedy}).token_ids)") == before


def test_text_is_shown_as_text(cell):
    """Text of a model is not interpreted as HTML."""
    cell.run("from mlxinfer.notebook.display import _Cell; from mlxinfer import Completion, Usage")
    cell.run("shown = _Cell(); shown.show('<script>x</script>'); shown.end(Completion('', [], 'stop', Usage(1, 1)))")
    assert "&lt;script&gt;" in cell.last_display["text/html"]
    assert "<script>" not in cell.last_display["text/html"]


def test_an_async_model_is_told_the_right_call(model):
    llm = AsyncLLM(model)
    with pytest.raises(MLXInferError, match="async for"):
        stream(llm, "hello", PARAMS)
    asyncio.run(llm.close())


def test_pictures_are_shown_above_the_answer():
    with notebook_kernel() as cell:
        cell.run("import numpy as np\nfrom mlxinfer import LLM, SamplingParams\nfrom mlxinfer.notebook import stream")
        cell.run(f"llm = LLM({str(GOLDEN / 'smolvlm')!r}); picture = np.zeros((900, 300, 3), np.uint8); p = SamplingParams(max_tokens=2)")
        shown = "from mlxinfer.notebook.display import show_pictures, pictures_of"
        cell.run(f"{shown}; show_pictures([picture, picture])")
        assert cell.last_display["text/plain"] == "2 pictures"
        assert cell.last_display["text/html"].count('<img src="data:image/png;base64,') == 2
        told = cell.run("c = stream(llm, 'what?', p, images=[picture]); print(c.usage.stats.images, c.usage.completion_tokens)")
        assert told == "1 2"
        part = "[{'role': 'user', 'content': [{'type': 'image', 'image': picture}, {'type': 'text', 'text': 'what?'}]}]"
        assert cell.run(f"print(len(pictures_of({part})), stream(llm, {part}, p).token_ids == c.token_ids)") == "1 True"
