from __future__ import annotations

from pathlib import Path

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from benchmarks.samples import TOKENS_PER_S, Results, Sample
from benchmarks.types.models import KINDS, models
from benchmarks.types.random_model import Sizes, write
from benchmarks.types.report import table
from mlxinfer import LLM, SamplingParams

TINY = Sizes(hidden=64, inner=96, layers=2, heads=2, kv_heads=1, vocabulary=300)


def test_a_random_model_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", TINY, lambda name, layer: "Q5_0" if layer else "Q8_0")
    answer = LLM(str(path)).generate("The capital", SamplingParams(temperature=0, max_tokens=3))[0]
    assert len(answer.token_ids) == 3


def test_blocks_that_do_not_divide_the_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no blocks of Q4_K"):
        write(tmp_path / "tiny.gguf", TINY, lambda name, layer: "Q4_K")


def test_every_model_can_be_written_and_every_type_is_there() -> None:
    for name, model in models().items():
        for layer in range(model.sizes.layers):
            for matrix, (_, columns) in {**model.sizes.matrices(), "token_embd": (1, model.sizes.hidden)}.items():
                kind = GGMLQuantizationType[model.type_of(matrix, layer)]
                assert columns % GGML_QUANT_SIZES[kind][0] == 0, name
    assert {name.partition(" ")[2] for name in models()} == {*KINDS, "Q4_K_M"}


def test_the_table_has_both_speeds_and_their_ratio() -> None:
    def sample(work: str, engine: str, value: float) -> Sample:
        return Sample("896 Q8_0", work, engine, 1, 1, 1, 1, value, TOKENS_PER_S)

    speeds = {"mlxinfer": 300.0, "llama.cpp": 100.0}
    found = [sample(work, engine, value) for work in ("decode at 0", "prefill 512") for engine, value in speeds.items()]
    row = table([Results("896 Q8_0", found)], "decode at 0").splitlines()[-1]
    assert row == "| 896 Q8_0 | 300 | 100 | 3.00 (3.00–3.00) | – | 300 | 100 | 3.00 (3.00–3.00) | – |"
