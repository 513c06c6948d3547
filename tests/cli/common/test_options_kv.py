from __future__ import annotations

import json

import pytest
from support.models.tiny_directory import tiny_directory

GREEDY = ("--temperature", "0", "--max-tokens", "80")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "hybrid", "qwen3_next", eos=False))


def test_a_quantized_cache_answers_and_tells_its_loss(call, chat_model):
    prompt = "hello " * 20
    result = call("run", chat_model, prompt, "--kv", "8", *GREEDY)
    assert result.code == 0
    assert "the cache is quantized (kv 8)" in result.err
    assert "the cache" not in call("run", chat_model, prompt, *GREEDY).err


@pytest.mark.parametrize("command", ["run", "chat", "bench", "doctor"])
def test_a_format_that_does_not_exist_is_refused_with_those_that_do(call, chat_model, command):
    result = call(command, chat_model, *(["hello"] if command == "run" else []), "--kv", "7")
    assert result.code == 2
    assert "16, 8, 6, 5, 4, 3 or 2" in result.err
    assert result.out == ""


def test_layers_that_stay_as_they_are_say_so(call, hybrid):
    assert "recurrent state in float32" in call("run", hybrid, "hello", "--kv", "4", "--kv-first16", *GREEDY).err


def test_doctor_describes_the_cache_of_a_model(call, hybrid):
    result = call("doctor", hybrid, "--kv", "k8v4")
    assert [line for line in result.out.splitlines() if not line.startswith(" ")] == ["model", "cache, kv k8v4", "attention", "memory"]
    assert "layers 0-1: a recurrent state" in result.out
    assert "layer 2: keys and values of the whole context, keys 8 bits, values 4 bits" in result.out
    plain, quantized = (json.loads(call("doctor", hybrid, "--json", "--kv", kv).out)["token_bytes"] for kv in ("16", "4"))
    assert quantized < plain / 3  # of bfloat16, and half of that of float32


@pytest.mark.long
def test_bench_says_which_cache_it_measured(call, chat_model):
    arguments = ("--prefill", "70", "--decode-depth", "70", "--batch", "1", "--repeat", "1", "--steps", "4", "--json")
    found = {kv: json.loads(call("bench", chat_model, *arguments, "--kv", kv).out) for kv in ("16", "4")}
    assert {kv: one["kv"] for kv, one in found.items()} == {"16": "16", "4": "4"}
    sixteen, four = (one["rows"][-1]["cost"]["bytes"] for one in found.values())
    assert four < sixteen
