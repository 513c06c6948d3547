"""lm-eval's `local-completions` on a small task: scores texts with echo and log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.http.live_server import live_server

from mlxinfer.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.model

TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: {kind}
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
{more}
"""
CHOICES = """doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(capital)}}"
target_delimiter: " "
metric_list: [{metric: acc}]
"""
WORDS = """doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8}
filter_list: [{name: first, filter: [{function: regex, regex_pattern: "([A-Z][a-z]+)"}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
"""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Russia": "Moscow", "Egypt": "Cairo"}


@pytest.mark.parametrize(
    ("kind", "more", "metric"), [("multiple_choice", CHOICES, "acc,none"), ("generate_until", WORDS, "exact_match,first")]
)
def test_it_finds_capitals(tmp_path: Path, kind: str, more: str, metric: str) -> None:
    pytest.importorskip("lm_eval")
    data = tmp_path / "capitals.jsonl"
    cities = list(CAPITALS.values())
    rows = [{"country": country, "capital": capital, "choices": cities} for country, capital in CAPITALS.items()]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "capitals.yaml").write_text(TASK.format(data=data, kind=kind, more=more))
    with live_server({"smollm2": lambda: AsyncLLM("smollm2")}) as server:
        server.models["smollm2"].tokenizer.save(tmp_path)
        settings = f"model=smollm2,base_url={server.url}/v1/completions,num_concurrent=4,max_retries=1,tokenizer={tmp_path}"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", settings]
        command += ["--include_path", str(tmp_path / "tasks"), "--tasks", "capitals", "--output_path", str(tmp_path / "out")]
        environment = {**os.environ, "HOME": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(found.read_text())["results"]["capitals"][metric] >= 5 / 6
