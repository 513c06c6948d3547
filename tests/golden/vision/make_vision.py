"""Writes tests/golden/vision: pictures, prompts, token ids and digests of pixels that transformers computed.

    python tests/golden/vision/make_vision.py DIRECTORY

DIRECTORY has a folder for each family: config, processor and tokenizer files, and a `reference.npz` of a tiny random checkpoint. Its cases
hold messages, images, the rendered prompt, and what the processor (Pil image processor, version 5.23) and `get_rope_index` returned.
Kept are the inputs, ids, grids and positions; pixel values are kept as SHA-256 of float32 in C order, as `about` has them for some cases.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent
FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
KEPT = ("messages", "prompt", "input_ids", "image_grid_thw", "image_sizes", "position_ids", "rope_delta", "token_types")


def reduce(source: Path) -> None:
    target = GOLDEN / source.name
    target.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    with np.load(source / "reference.npz", allow_pickle=False) as reference:
        about, cases = json.loads(str(reference["about"])), json.loads(str(reference["cases"]))
        found = {"cases": reference["cases"]}
        for case in cases:
            names = [name for name in reference.files if name.startswith(f"{case}_image_") or name in {f"{case}_{key}" for key in KEPT}]
            found |= {name: reference[name] for name in names}
            digest = about[case].get("pixel_values_sha256")
            if f"{case}_pixel_values" in reference.files:
                digest = hashlib.sha256(np.ascontiguousarray(reference[f"{case}_pixel_values"]).tobytes()).hexdigest()
            if digest:
                found[f"{case}_pixels"] = np.array(digest)
    np.savez_compressed(target / "reference.npz", **found)


if __name__ == "__main__":
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        if (folder / "reference.npz").is_file():
            reduce(folder)
