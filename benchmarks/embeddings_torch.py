"""The other side of `python -m benchmarks.embeddings`: sentence-transformers' way with transformers, in a Python that has torch.

Given a folder, it makes the checkpoints there. Given a name and a number of threads too, it loads one, embeds the token ids of ids.json
whenever a line comes, and prints seconds, those of processor time, and vectors.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "qwen3, last token, 107M": {
        "model_type": "qwen3",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
    },
    "gemma3 both ways, mean, 100M": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 2048,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": 256,
    },
}
"""Those of SmolLM2-135M and Gemma 3 270M, with a small vocabulary; weights are random."""
VOCAB, CONTEXT, BATCH = 2048, 1024, 32


def make(folder: Path) -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    for name, sizes in SIZES.items():
        kind = sizes["model_type"]
        torch.manual_seed(1)
        given = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **sizes}
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(given.pop("model_type"), **given)).float()
        model.save_pretrained(folder / kind)
        (folder / kind / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"embedding_dimension": sizes["hidden_size"], "pooling_mode": "mean" if "mean" in name else "lasttoken"}
        (folder / kind / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        modules = [{"path": "1_Pooling", "type": "Pooling"}, {"path": "2_Normalize", "type": "Normalize"}]
        (folder / kind / "modules.json").write_text(json.dumps(modules))


def run(folder: Path, name: str, threads: int) -> None:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(threads)
    model = transformers.AutoModel.from_pretrained(folder / name, dtype=torch.float32).eval()
    texts = json.loads((folder / "ids.json").read_text())
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        rows: dict[int, list[float]] = {}
        with torch.no_grad():
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                width = max(len(texts[i]) for i in chosen)
                ids = torch.tensor([[0] * (width - len(texts[i])) + texts[i] for i in chosen])
                mask = torch.tensor([[0] * (width - len(texts[i])) + [1] * len(texts[i]) for i in chosen])
                states = model(input_ids=ids, attention_mask=mask).last_hidden_state
                pooled = states[:, -1] if name == "qwen3" else (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                rows.update(zip(chosen, torch.nn.functional.normalize(pooled, dim=1).tolist(), strict=True))
        found = {"seconds": time.perf_counter() - began, "processor": time.process_time() - used}
        print(json.dumps(found | {"vectors": [rows[i] for i in range(len(texts))]}), flush=True)


if __name__ == "__main__":
    make(Path(sys.argv[1])) if len(sys.argv) == 2 else run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
