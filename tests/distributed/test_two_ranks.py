"""Two processes on loopback answer exactly what one does, with everything on that could get in their way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from support.engines.pair import Scenario, run_pair
from support.http.ports import free_port
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
TRUNK = [(i * 7) % 90 + 3 for i in range(100)]
GROWING = [[*range(5 + i, 15 + i)] for i in range(5)]
PROMPTS = [*GROWING, [*TRUNK, 5, 6, 7], [*TRUNK[:90], 1, 2, 3], [3, 4, 5] * 20, [9, 8, 7], "{"]
PARAMS = [
    *[{"max_tokens": 130, "temperature": 0.0, "ignore_eos": True}] * 5,
    {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 1.0, "seed": 4, "n": 2, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    {"max_tokens": 60, "temperature": 0.8, "seed": 3, "top_p": 0.9, "logprobs": 2, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 0.9, "seed": 1, "regex": "\\{[a-z]{5,30}\\}"},
]


def blocks_of(path):
    config = json.loads((path / "config.json").read_text())
    return config.get("text_config", config).get("num_hidden_layers", 2)


HYBRIDS = ("qwen3_next", "falcon_h1", "nemotron_h")
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.name not in HYBRIDS and blocks_of(path) > 1)


def plain(model):
    """Two prompts that begin alike, one after the other."""
    params = [{"max_tokens": 30, "temperature": 0.0}, {"max_tokens": 20, "temperature": 0.9, "seed": 5}]
    return Scenario(model=str(model), prompts=[TRUNK, [*TRUNK[:70], 9]], params=params, settings={"max_context": 256}, rounds=2)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """Prefix hits, pages of 4 bits, drafts, samples of one prompt, an answer held to a structure, and pages that have to be given back."""
    model = tiny_directory(tmp_path_factory.mktemp("pair") / "model", characters=JSON_CHARACTERS)
    settings = {"kv": "4", "max_context": 256}
    return run_pair([Scenario(str(model), PROMPTS, PARAMS, settings, preempts=40, rounds=2, eager=True)], free_port())[0]


@pytest.mark.long
def test_answers_are_those_of_one_process(crowded):
    assert crowded["tokens"] == crowded["alone"]["tokens"]
    assert crowded["logprobs"] == crowded["alone"]["logprobs"]
    held = crowded["texts"][-1]
    assert held[0] == "{"
    assert held[1:].rstrip("}").islower()


@pytest.mark.long
def test_it_reused_drafted_and_gave_pages_back(crowded):
    assert crowded["reused_tokens"] > 0
    assert crowded["accepted_tokens"] > 0
    assert crowded["preemptions"] > 0


@pytest.mark.long
def test_each_rank_reads_and_holds_its_part_only(crowded):
    """The model has three blocks: one for rank 0 with the embedding and the head, two for rank 1."""
    (other,) = crowded["read"]
    with safe_open(GOLDEN / "llama" / "model.safetensors", "numpy") as file:
        blocks = sum(file.get_tensor(name).nbytes for name in file.keys() if ".layers." in name)  # noqa: SIM118
    assert other["read"] == blocks * 2 / 3
    assert crowded["weights"] < crowded["alone"]["weights"] / 2
    assert crowded["weights"] + other["held"] == crowded["alone"]["weights"]


@pytest.mark.long
def test_rows_take_what_they_must(crowded):
    """Rank 0 sends a hidden row for every computed token, 64 numbers of 4 bytes here, and nothing else on the ring."""
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    assert crowded["rows"] % (config["hidden_size"] * 4) == 0


@pytest.mark.long
def test_shares_of_blocks_answer_alike():
    """Sums of two halves differ from whole products in their last bits: in float32 tokens are the same all the same."""
    scenarios = [replace(plain(GOLDEN / name), split="tensor") for name in ("llama", "qwen3")]
    for found in run_pair(scenarios, free_port()):
        assert found["tokens"] == found["alone"]["tokens"]
        assert found["reused_tokens"] > 0


@pytest.mark.long
def test_states_of_hybrids_stay_with_their_layers():
    for found in run_pair([plain(GOLDEN / name) for name in HYBRIDS], free_port()):
        assert found["tokens"] == found["alone"]["tokens"]
        assert found["reused_tokens"] > 0


@pytest.mark.slow
def test_all_families_answer_alike():
    for name, found in zip(FAMILIES, run_pair([plain(GOLDEN / name) for name in FAMILIES], free_port(), 400), strict=True):
        assert found["tokens"] == found["alone"]["tokens"], name
