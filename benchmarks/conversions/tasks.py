"""Tasks of lm-eval before and after a conversion. Their data are BIG-bench's, from the archive of its package (`pip download bigbench`)."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer import LLM

from .jobs import Job
from .likelihoods import Found, Pair, log_likelihoods
from .source import PIECES, source, writer_of
from .step import preparations
from .study import slug
from .ways import ways

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

TASKS = {
    "goal_inference": "goal_step_wikihow/goal_inference",
    "step_inference": "goal_step_wikihow/step_inference",
    "social_iqa": "social_iqa",
}
"""Multiple choice about everyday life, in few tokens; and where it lies among BIG-bench's `benchmark_tasks`."""
SOURCE = "source"
WAYS = (SOURCE, "mx.quantize: 4 bits", "mlxinfer fit: 4 bits", "mlxinfer gptq: 4 bits", "llama.cpp, imatrix: Q4_K_M")
"""What is compared."""
METRICS = ("acc", "acc_norm")
"""lm-eval's: whether the likeliest choice is right, and the likeliest for its length in bytes."""
_SEED = 0
_YAML = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: text
doc_to_choice: choices
doc_to_target: gold
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
Result = dict[str, Any]


def write_tasks(archive: Path, folder: Path, items: int) -> None:
    """Tasks of lm-eval with so many items at most, drawn from BIG-bench's. Raises OSError, `tarfile.TarError`, KeyError for another
    archive."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        files = {member.name: member for member in tar.getmembers()}
        for name, place in TASKS.items():
            found = next((file for file in files if file.endswith(f"benchmark_tasks/{place}/task.json")), None)
            read = tar.extractfile(files[found]) if found else None
            if read is None:
                raise KeyError(f"{archive} has no {place}")
            data = folder / f"{name}.jsonl"
            data.write_text("".join(f"{json.dumps(each)}\n" for each in _items(json.load(read), items)), encoding="utf-8")
            (folder / f"{name}.yaml").write_text(_YAML.format(name=name, data=data.absolute()), encoding="utf-8")


def _items(task: dict[str, Any], most: int) -> Iterator[dict[str, Any]]:
    """Text, choices and the index of the right one, as BIG-bench puts its questions."""
    before, after = task.get("example_input_prefix", "\nQ: "), task.get("example_output_prefix", "\nA: ")
    examples = task["examples"]
    for example in random.Random(_SEED).sample(examples, min(most, len(examples))):
        scores = example["target_scores"]
        text = f"{task.get('task_prefix', '')}{before}{example['input'].rstrip()}{after}".strip()
        yield {"text": text, "choices": [choice.strip() for choice in scores], "gold": list(scores).index(max(scores, key=scores.get))}


def measure_tasks(name: str, path: Path, key: str, archive: Path, room: Path, items: int) -> Result:
    """lm-eval's accuracies of a model made in one way, `source` for the source itself; kept in the room, with what is right item by item.
    Raises what making it does, StopIteration for a way that there is not, ImportError without lm-eval."""
    kept = room / "tasks" / f"{slug(name, key)}.json"
    if kept.exists():
        found: Result = json.loads(kept.read_text(encoding="utf-8"))
        return found
    folder = kept.with_name(f"{slug(name, key)}.data")
    write_tasks(archive, folder, items)
    model = target = source(name, path, room)
    if key != SOURCE:
        target = room / slug(f"{name}.tasks", key)
        way = next(way for way in ways() if way.key == key)
        way.make(model, target)
        key = way.title(model)
    with LLM(target, dtype="float32", max_num_seqs=1, prefix_cache=False, speculate=False) as llm:
        result = {"model": name, "way": key, **_evaluated(llm, folder)}
    kept.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if target != model:
        shutil.rmtree(target)
    return result


def _evaluated(llm: LLM, folder: Path) -> Result:
    """lm-eval's figures, and a 0 or 1 for each item."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # before they are imported
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Ours(LM):  # type: ignore[misc]
        """An open model, as lm-eval asks it."""

        def loglikelihood(self, requests: list[Instance]) -> list[Found]:
            return log_likelihoods(llm.loaded.model, [_pair(llm, *request.args) for request in requests])

        def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: list[Instance]) -> list[str]:
            raise NotImplementedError

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model=Ours(), tasks=list(TASKS), task_manager=manager, log_samples=True)
    samples = {name: sorted(found["samples"][name], key=lambda each: int(each["doc_id"])) for name in TASKS}
    right = {name: {metric: "".join(str(int(each[metric])) for each in samples[name]) for metric in METRICS} for name in TASKS}
    figures = {name: {key.partition(",")[0]: value for key, value in found["results"][name].items() if "acc" in key} for name in TASKS}
    return {"figures": figures, "right": right}


def _pair(llm: LLM, context: str, continuation: str) -> Pair:
    before, whole = (llm.tokenizer.encode(text, add_special_tokens=True) for text in (context, context + continuation))
    return tuple(whole[: len(before)]), tuple(whole[len(before) :])


def table(results: Sequence[Result]) -> str:
    """Markdown: accuracies and what each conversion changes of the source's, with standard errors, paired item by item."""
    text = ""
    for model in dict.fromkeys(each["model"] for each in results):
        rows = [each for each in results if each["model"] == model]
        first = next((each for each in rows if each["way"] == SOURCE), None)
        sizes = ", ".join(f"{len(right['acc'])} items of {name}" for name, right in rows[0]["right"].items())
        text += f"{model}, {sizes}: lm-eval's `acc_norm`\n\n"
        text += f"| | {' | '.join(TASKS)} | all | all, less the source | right or wrong as the source |\n"
        text += f"| --- |{' ---: |' * (len(TASKS) + 3)}\n"
        for row in rows:
            every = _all(row)
            cells = [_with_error(_right(row, name)) for name in TASKS] + [_with_error(every)]
            if first is not None and row is not first:
                moved = every - _all(first)
                cells += [f"{moved.mean():+.1%} ± {_stderr(moved):.1%}", f"{(moved == 0).mean():.1%}"]
            else:
                cells += ["", ""]
            text += f"| {row['way']} | {' | '.join(cells)} |\n"
        text += "\n"
    return text


def _all(row: Result) -> np.ndarray:
    return np.concatenate([_right(row, name) for name in TASKS])


def _right(row: Result, name: str) -> np.ndarray:
    """float `[items]`, 1 for each that is right."""
    return np.array(list(row["right"][name]["acc_norm"]), float)


def _with_error(right: np.ndarray) -> str:
    return f"{right.mean():.1%} ± {_stderr(right):.1%}"


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def jobs(models: dict[str, Path], archive: Path, room: Path, items: int, pieces: int = PIECES) -> list[Job]:
    """A process for each model that is compared, and before them for what they are made of."""
    found: list[Job] = []
    for name, path in models.items():
        found += preparations(room, name, path, pieces, False, writer_of(name, models))
        for key in WAYS:
            command = (sys.executable, "-m", __name__, name, str(path), key, str(archive), str(room), str(items))
            found.append(Job(f"{name} tasks, {key}", command, (f"{name} {'source' if key == SOURCE else 'importance'}",)))
    return found


def kept(room: Path) -> list[Result]:
    """What has been measured, in the order of `WAYS`."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((room / "tasks").glob("*.json"))]
    return sorted(found, key=lambda each: (each["model"], next(at for at, key in enumerate(WAYS) if each["way"].startswith(key))))


if __name__ == "__main__":  # NAME FILE WAY ARCHIVE ROOM ITEMS
    measure_tasks(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]), int(sys.argv[6]))
