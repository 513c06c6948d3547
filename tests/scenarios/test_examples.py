"""Every file in examples/ runs, as its docstring says, and prints what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxinfer import LLM, SamplingParams
from mlxinfer.models.heads.kinds import kind_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROMISES = {
    "generate": "Paris",
    "stream": "less likely than 10 %",
    "many_requests": "To be or not to be,",
    "long_context": "prompt tokens were cached",
    "convert": "MB became",
    "structured": "the capital is Paris, in Europe",
    "adapters": "the model itself: ",
    "tools": "It is sunny in Paris",
}
pytestmark = pytest.mark.model


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PROMISES, "images", "openai_client", "head_texts", "train_mtp_head"}


@pytest.mark.parametrize("name", PROMISES)
def test_it_prints_what_it_promises(name: str) -> None:
    assert PROMISES[name] in run(name)


def test_images(tmp_path: Path) -> None:
    from PIL import Image
    from support.models.seeing import GOLDEN

    Image.new("RGB", (300, 200), "red").save(tmp_path / "red.png")
    printed = run("images", str(GOLDEN / "smolvlm"), str(tmp_path / "red.png"))
    assert "300 x 200 pixels, 28 of " in printed
    assert "the picture's too, were cached" in printed


@pytest.fixture
def url() -> Iterator[str]:
    pytest.importorskip("openai", reason="openai is not installed (make test installs it)")
    from support.http.live_server import live_server

    from mlxinfer import AsyncLLM

    with live_server({"smollm2": lambda: AsyncLLM("smollm2")}) as server:
        yield f"{server.url}/v1"


def test_openai_client(url: str) -> None:
    assert "Paris" in run("openai_client", url)


def test_openai_client_without_a_server() -> None:
    pytest.importorskip("openai", reason="openai is not installed (make test installs it)")
    command = [sys.executable, str(EXAMPLES / "openai_client.py"), "http://127.0.0.1:1/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "start mlxinfer serve first" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_train_mtp_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's head, from its own text to the files that `--draft` takes. It needs torch."""
    torch = pytest.importorskip("torch", reason="torch is not installed (make torch)")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tests/golden/embeddings/last")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, **sizes))
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(EXAMPLES)
    import head_texts
    import train_mtp_head as example

    for name, value in {"MOST": 96, "QUESTION": 4, "STREAMS": 40}.items():
        monkeypatch.setattr(head_texts, name, value)
    for name, value in {"HELD": 1000, "BATCH": 4}.items():
        monkeypatch.setattr(example, name, value)
    options = ["--texts", "64", "--minutes", "0.02", "--vocabulary", "32", "--bits", "4"]
    monkeypatch.setattr("sys.argv", ["train_mtp_head", str(tmp_path / "model"), str(tmp_path / "head"), *options])
    example.main()
    assert kind_of(json.loads((tmp_path / "head" / "config.json").read_text())) == "llama"
    answers = []
    for draft in (None, tmp_path / "head"):
        with LLM(tmp_path / "model", draft=draft, speculate=False, max_context=128) as llm:
            answers.append(llm.generate(["the"], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0].token_ids)
            drafted = llm.stats().drafted_tokens
    assert answers[0] == answers[1]
    assert drafted > 0
