"""The results as a table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Result = dict[str, Any]


def table(results: list[Result]) -> str:
    """Markdown: a table for each model, by bits per weight."""
    text = ""
    for model in dict.fromkeys(each["model"] for each in results):
        rows = sorted((each for each in results if each["model"] == model), key=lambda each: (each["bpw"], each["kl_mean"]))
        text += f"{model}, {rows[0]['positions']} positions\n\n"
        text += "| bits per weight | | KL | 99 % below | same likeliest token | perplexity | against llama.cpp at its size |\n"
        text += "| ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
        for row in rows:
            text += f"| {row['bpw']:.2f} | {row['way']} | {row['kl_mean']:.4f} ± {row['kl_stderr']:.4f} | {row['kl_p99']:.2f} "
            text += f"| {row['top1']:.1%} | x{row['ppl_ratio']:.3f} | {_against_llama_cpp(row, rows)} |\n"
        text += "\n"
    return text


def paired(row: Result, other: Result) -> tuple[float, float]:
    """How much larger a KL divergence is than another's, and the standard error of that, from the means of windows."""
    differences = np.array(row["kl_of_windows"]) - np.array(other["kl_of_windows"])
    return float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences)))


def _against_llama_cpp(row: Result, rows: list[Result]) -> str:
    """The difference from llama.cpp's result of about the same size."""
    theirs = [each for each in rows if each["engine"].startswith("llama.cpp") and each is not row and _part(each) == _part(row)]
    near = [each for each in theirs if abs(each["bpw"] - row["bpw"]) < 0.07]
    if not near:
        return ""
    mean, stderr = paired(row, near[0])
    return f"{mean:+.4f} ± {stderr:.4f} ({near[0]['way'].partition(': ')[2]})"


def _part(row: Result) -> bool:
    """Whether only the layers were quantized."""
    return "layers only" in row["way"]
