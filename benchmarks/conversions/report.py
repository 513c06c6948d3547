"""The results as a table."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

Result = dict[str, Any]
_ENCODERS = ("mlxinfer fit", "mlxinfer gptq")
_TOKENS = re.compile(r", [\d,]+ tokens$")


def table(results: list[Result]) -> str:
    """Markdown: a table for each model, by bits per weight. Results of other programs have ours of their size beside them."""
    text = ""
    for model in dict.fromkeys(each["model"] for each in results):
        rows = sorted((each for each in results if each["model"] == model), key=lambda each: (each["bpw"], each["kl_mean"]))
        text += f"{model}, {rows[0]['positions']} positions\n\n"
        text += "| bits per weight | | KL | 99 % below | same likeliest token | perplexity "
        text += "| against llama.cpp at its size | our fit, gptq at this size |\n"
        text += "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        for row in rows:
            text += f"| {row['bpw']:.2f} | {row['way']} | {row['kl_mean']:.4f} ± {row['kl_stderr']:.4f} | {row['kl_p99']:.2f} "
            text += f"| {row['top1']:.1%} | x{row['ppl_ratio']:.3f} | {_against_llama_cpp(row, rows)} | {_ours(row, rows)} |\n"
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


def _ours(row: Result, rows: list[Result]) -> str:
    """For results of others: the KL divergences of our encoders at their size, those of as many tokens where any are read."""
    if row["engine"].startswith("mlxinfer"):
        return ""
    tokens = _TOKENS.search(row["way"])
    found = []
    for engine in _ENCODERS:
        points = [each for each in rows if each["engine"] == engine and _part(each) == _part(row)]
        same = [each for each in points if tokens and each["way"].endswith(tokens[0])]
        found.append(_between(same or points, row["bpw"]))
    return ", ".join("-" if each is None else f"{each:.3f}" for each in found) if any(found) else ""


def _between(points: list[Result], bpw: float) -> float | None:
    """Between the logarithms of the nearest results on either side; None where there are none. Of several of one size, the least counts."""
    points = sorted(points, key=lambda each: float(each["kl_mean"]))
    below = max((each for each in points if each["bpw"] <= bpw), key=lambda each: round(each["bpw"], 1), default=None)
    above = min((each for each in points if each["bpw"] >= bpw), key=lambda each: round(each["bpw"], 1), default=None)
    if below is None or above is None:
        return None
    share = (bpw - below["bpw"]) / max(above["bpw"] - below["bpw"], 1e-9)
    return math.exp((1 - share) * math.log(below["kl_mean"]) + share * math.log(above["kl_mean"]))


def _part(row: Result) -> bool:
    """Whether only the layers were quantized."""
    return "layers only" in row["way"]
