from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.run import run as run_command

GREEDY = ("--temperature", "0", "--max-tokens", "12")
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(chat_model):
    with LLM(chat_model) as llm:
        yield llm


@pytest.fixture(scope="module")
def greedy():
    return SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.smoke
def test_the_answer_alone_goes_to_standard_output(call, chat_model, llm, greedy):
    result = call("run", chat_model, "hello", *GREEDY)
    assert (result.code, result.out) == (0, llm.chat(HELLO, greedy).text + "\n")
    assert result.err == "stopped for length: --max-tokens is 12\n"


def test_statistics_are_printed_if_asked_for(call, chat_model):
    result = call("run", chat_model, "hello", "--stats", *GREEDY)
    assert "wrote 12 tokens" in result.err
    assert "stopped for length" in result.err
    assert "wrote 12 tokens" in call("run", chat_model, "hello", "--stats", "--quiet", *GREEDY).err


def test_quiet_leaves_standard_error_empty(call, chat_model):
    assert call("run", chat_model, "hello", "--quiet", *GREEDY).err == ""
    assert "note: " in call("run", chat_model, "hello", "--kv", "4", *GREEDY).err
    assert call("run", chat_model, "hello", "--kv", "4", "--quiet", *GREEDY).err == ""


def test_system_and_raw(call, chat_model, llm, greedy):
    system = [{"role": "system", "content": "be brief"}, *HELLO]
    assert call("run", chat_model, "hello", "--system", "be brief", *GREEDY).out == llm.chat(system, greedy).text + "\n"
    assert call("run", chat_model, "hello", "--raw", *GREEDY).out == llm.generate("hello", greedy)[0].text + "\n"


@pytest.mark.parametrize(("arguments", "stdin"), [([], "hello\n"), (["-"], "hello"), (["hello"], "\n")])
def test_the_prompt_may_come_from_standard_input(call, chat_model, llm, greedy, arguments, stdin):
    assert call("run", chat_model, *arguments, *GREEDY, stdin=stdin).out == llm.chat(HELLO, greedy).text + "\n"


def test_standard_input_follows_the_argument(call, chat_model, llm, greedy):
    joined = [{"role": "user", "content": "sum up\n\nline 1\nline 2"}]
    assert call("run", chat_model, "sum up", *GREEDY, stdin="line 1\nline 2\n").out == llm.chat(joined, greedy).text + "\n"


def test_json(call, chat_model, llm, greedy):
    result = call("run", chat_model, "hello", "--json", *GREEDY)
    found = json.loads(result.out)
    expected = {"text", "finish_reason", "prompt_tokens", "completion_tokens", "ttft_s", "prefill_tps", "decode_tps", "peak_memory_bytes"}
    expected |= {"stats", "reasoning_tokens"}
    assert set(found) == expected
    assert (found["text"], found["finish_reason"], found["completion_tokens"]) == (llm.chat(HELLO, greedy).text, "length", 12)
    assert found["prompt_tokens"] == len(llm.tokenizer.encode_chat(HELLO))
    assert result.err == ""


def test_several_answers(call, chat_model):
    sampled = ("--n", "3", "--seed", "5", "--temperature", "1", "--max-tokens", "6")
    choices = json.loads(call("run", chat_model, "hello", "--json", *sampled).out)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) > 1
    assert call("run", chat_model, "hello", *sampled).out == "".join(
        f"--- {choice['index'] + 1} of 3 ---\n{choice['text']}\n" for choice in choices
    )


def test_logprobs(call, chat_model, llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    expected = llm.chat(HELLO, params).logprobs
    given = ("--logprobs", "2", "--temperature", "0", "--max-tokens", "4")
    found = json.loads(call("run", chat_model, "hello", "--json", *given).out)["logprobs"]
    assert [token["token_id"] for token in found] == [token.token_id for token in expected]
    assert found[0]["logprob"] == pytest.approx(expected[0].logprob, abs=1e-4)
    assert len(found[0]["top"]) == 2
    lines = call("run", chat_model, "hello", *given).err.splitlines()
    assert [line.split()[0] for line in lines[:4]] == [repr(token.text) for token in expected]


def test_sampling_flags_reach_the_sampler(call, chat_model, llm):
    letter = llm.tokenizer.encode("A")[0]
    assert call("run", chat_model, "x", *GREEDY, "--logit-bias", f"{letter}:100").out == "A" * 12 + "\n"
    text = call("run", chat_model, "hello", *GREEDY).out.strip()
    assert call("run", chat_model, "hello", *GREEDY, "--stop", text[5:7]).out.strip() == text[: text.index(text[5:7])]


def test_every_sampling_parameter_has_a_flag():
    flags = {parameter.name for parameter in run_command.params}
    assert {field.name for field in fields(SamplingParams)} - {"stop_token_ids", "structure", "adapter"} | {"schema", "adapters"} <= flags


@pytest.mark.parametrize(
    "arguments",
    [
        ["no/such/model", "hi"],
        ["./nothing", "hi"],
        ["MODEL", ""],
        ["MODEL"],
        ["MODEL", "hi", "--temperature", "-1"],
        ["MODEL", "hi", "--temperature", "nan"],
        ["MODEL", "hi", "--temperature", "hot"],
        ["MODEL", "hi", "--top-p", "0"],
        ["MODEL", "hi", "--max-tokens", "0"],
        ["MODEL", "hi", "--logprobs", "1000"],
        ["MODEL", "hi", "--logit-bias", "5"],
        ["MODEL", "hi", "--dtype", "float7"],
        ["MODEL", "hi", "--kv", "7"],
        ["MODEL", "hi", "--bits", "7"],
        ["MODEL", "hi", "--max-context", "0"],
        ["MODEL", "hi", "--max-context", "8"],
        ["MODEL", "x" * 300],
        ["MODEL", "hi", "--raw", "--system", "be brief"],
        ["MODEL", "hi", "--no-such-option"],
        ["MODEL", "hi", "there"],
        [],
    ],
    ids=" ".join,
)
def test_bad_input_gets_one_line_and_exit_code_2(call, chat_model, arguments):
    result = call("run", *(chat_model if argument == "MODEL" else argument for argument in arguments))
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("mlxinfer: ")
    assert result.err.count("\n") == 1


def test_a_model_without_template_is_continued(call, tmp_path):
    path = str(tiny_directory(tmp_path / "base", chat=False, rounded=True))
    assert call("run", path, "hello", *GREEDY).out == call("run", path, "hello", "--raw", *GREEDY).out
    assert call("run", path, "hello", "--system", "be brief").code == 2


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that goes on answering for a long time."""
    path = tiny_directory(tmp_path_factory.mktemp("models") / "long", eos=False, context=100_000, rounded=True)
    return [sys.executable, "-m", "mlxinfer", "run", str(path), "hi", "--temperature", "0", "--max-tokens", "90000"]


@pytest.mark.long
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_an_answer_without_a_traceback(endless, sent, code):
    process = subprocess.Popen(endless, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in err


@pytest.mark.long
def test_a_closed_pipe_ends_an_answer_quietly(endless, tmp_path: Path):
    err = tmp_path / "err"
    with err.open("wb") as file:
        process = subprocess.Popen(endless, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file)
        assert process.stdout is not None
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.wait(timeout=60) == 1
    assert err.read_bytes() == b""


@pytest.mark.long
@pytest.mark.parametrize(
    ("redirection", "code", "told"),
    [("<&-", 0, ""), (">&-", 2, "cannot write to standard output"), ("> /dev/full", 2, "standard output: No space left on device")],
)
def test_odd_standard_streams(chat_model, redirection, code, told):
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command = f"{sys.executable} -m mlxinfer run {chat_model} hi --max-tokens 2 --quiet {redirection}"
    done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert told in done.stderr
    assert done.stderr.count("\n") == bool(told)


def test_options_of_the_engine_change_no_answer(call, chat_model):
    greedy = ("run", chat_model, "hello hello hello", "--temperature", "0", "--max-tokens", "40")
    plain = call(*greedy, "--no-speculate", "--no-prefix-cache")
    assert plain.code == 0
    for options in ([], ["--deterministic"], ["--draft", chat_model], ["--memory", "1"]):
        assert call(*greedy, *options).out == plain.out


def test_several_answers_have_their_statistics_together(call, chat_model):
    err = call("run", chat_model, "hello", "--n", "3", "--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--stats").err
    assert "wrote 18 tokens" in err
    assert "stopped for length: --max-tokens is 6" in err


def test_a_full_context_is_told_from_max_tokens(call, chat_model):
    assert "the context of 256 tokens is full" in call("run", chat_model, "hello", "--temperature", "0", "--max-tokens", "1000").err


def test_a_loop_ends_the_answer_with_a_note(call, chat_model):
    looping = ("run", chat_model, "hello", "--temperature", "0", "--max-tokens", "150", "--logit-bias", "40:100")
    note = "stopped: the answer repeated the same text five times (--no-stop-on-loop lets it run)"
    assert call(*looping).err.split("\n")[0] == note
    assert json.loads(call(*looping, "--json").out)["finish_reason"] == "loop"
    assert call(*looping, "--no-stop-on-loop").err == "stopped for length: --max-tokens is 150\n"


@pytest.mark.parametrize(("option", "value"), [("--max-tokens", "0"), ("--top-k", "-5"), ("--repetition-penalty", "0")])
def test_errors_of_sampling_name_the_option(call, chat_model, option, value):
    assert call("run", chat_model, "hello", option, value).err.startswith(f"mlxinfer: {option} must be")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x7fELF\x02\0\0", "standard input is not text"),
        ("hello".encode("utf-16"), "standard input is UTF-16"),
        (b"caf\xe9", "standard input is not UTF-8 text: byte 4 is 0xe9"),
    ],
)
def test_what_is_no_text_is_refused(call, chat_model, data, told):
    result = call("run", chat_model, *GREEDY, stdin=data)
    assert (result.code, result.out) == (2, "")
    assert told in result.err


def test_a_byte_order_mark_is_no_part_of_the_prompt(call, chat_model, llm, greedy):
    assert call("run", chat_model, *GREEDY, stdin=b"\xef\xbb\xbfhello\r\n").out == llm.chat(HELLO, greedy).text + "\n"


def test_a_file_that_the_prompt_names_is_added(call, chat_model, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("the moon\n")
    result = call("run", chat_model, f"sum up @{note}", "--json", *GREEDY)
    plain = call("run", chat_model, "sum up @nosuch", "--json", *GREEDY)
    assert json.loads(result.out)["prompt_tokens"] > json.loads(plain.out)["prompt_tokens"]
    assert f"with {note} (9 B)" in result.err
    assert plain.err == call("run", chat_model, f"sum up @{note}", "--json", "-q", *GREEDY).err == ""


def test_files_are_added_to_the_prompt(call, chat_model, llm, greedy, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("the moon\n")
    named = [{"role": "user", "content": "sum up\n\nnote.txt:\n```\nthe moon\n```"}]
    result = call("run", chat_model, "sum up", "-f", str(note), *GREEDY)
    assert (result.out, result.err.splitlines()[0]) == (llm.chat(named, greedy).text + "\n", f"with {note} (9 B)")
    assert call("run", chat_model, "-f", str(note), *GREEDY).out == llm.chat("the moon", greedy).text + "\n", "the prompt itself"
    assert "cannot read nosuch.txt" in call("run", chat_model, "hello", "-f", "nosuch.txt", *GREEDY).err
