"""Adapters of random numbers for arch/llama, written by PEFT 0.21.2, with the logits that PEFT gives after the last token of IDS.

Run with a Python that has torch, transformers and peft; writes adapters/<name>/.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
IDS = list(range(3, 60))
PATTERNS = {"rank_pattern": {"down_proj": 3, r"layers\.1\..*q_proj": 1}, "alpha_pattern": {"v_proj": 20}}
CASES = {
    "dora": {"r": 2, "lora_alpha": 6, "use_dora": True, "use_rslora": True, "target_modules": r".*\.layers\.1\..*(q_proj|down_proj)"},
    "patterns": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **PATTERNS},
}

for name, settings in CASES.items():
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(HERE / "arch" / "llama", dtype=torch.float32, attn_implementation="eager").eval()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    folder = HERE / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if "lora_B" in parameter:
                values.normal_(0, 0.3)
            if "magnitude" in parameter:
                values.mul_(torch.rand_like(values) + 0.5)
        model.save_pretrained(folder)
        np.save(folder / "logits.npy", model(torch.tensor([IDS])).logits[0, -1].float().numpy())
    (folder / "README.md").unlink()
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(str(HERE / "arch" / "llama"), "llama"))
