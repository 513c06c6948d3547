"""Writes tests/golden/vision/towers: vision towers of tiny random checkpoints, with the features that transformers computes in float32.

    python tests/golden/vision/towers/make_towers.py [DIRECTORY] [FAMILY ...]

Run with a Python that has torch and transformers 5.24. Each family has config.json, model.safetensors (tensors of the tower only, named as
on the hub) and reference.npz. Its cases C (JSON list `cases`) hold C_codes, whose pixel values are `values[C_codes]`; C_sizes
[pieces, 2]: height and width in pixels; C_features; and C_deepstack [layers, rows, hidden].

DIRECTORY has complete checkpoints in folders named after `REDUCED`, with a reference.npz that also holds C_pixel_values as transformers'
Pil image processors give them; their tensors are copied, and the case of two images. Families of `MADE` are made here, with random pixels.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

GOLDEN = Path(__file__).parent
REDUCED = ("smolvlm", "mistral3", "qwen3_vl", "gemma3")
TOWER = ("vision", "visual", "connector", "projector")
TEXT = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)


def save(name, config, tensors, cases):
    """Write a family; `cases` map names to (pixels, sizes, features, deepstack or None)."""
    target = GOLDEN / name
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, target / "model.safetensors")
    values = np.unique(np.concatenate([case[0].reshape(-1) for case in cases.values()]))
    found = {"cases": np.array(json.dumps(list(cases))), "values": values}
    for case, (pixels, sizes, features, deepstack) in cases.items():
        found[f"{case}_codes"] = np.searchsorted(values, pixels).astype(np.uint16)
        found[f"{case}_sizes"], found[f"{case}_features"] = np.array(sizes, np.int32), features
        if deepstack is not None:
            found[f"{case}_deepstack"] = deepstack
    np.savez_compressed(target / "reference.npz", **found)


# ---------------------------------------------------------------- complete checkpoints, reduced
def reduced(source):
    config = json.loads((source / "config.json").read_text())
    with safe_open(source / "model.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if any(part in name for part in TOWER)}
    cases = {}
    with np.load(source / "reference.npz") as reference:
        for case in ("two",):
            pixels, features = reference[f"{case}_pixel_values"], reference[f"{case}_features"]
            deepstack = reference[f"{case}_deepstack"] if f"{case}_deepstack" in reference.files else None
            if f"{case}_image_grid_thw" in reference.files:
                patch = config["vision_config"]["patch_size"]
                cases[case] = pixels, [(rows * patch, columns * patch) for _, rows, columns in reference[f"{case}_image_grid_thw"]], features, deepstack
            elif f"{case}_image_sizes" in reference.files:  # padded to one size: an image is a case
                first, unit = 0, config["vision_config"]["patch_size"] * config["spatial_merge_size"]
                for k, (height, width) in enumerate(reference[f"{case}_image_sizes"]):
                    last = first + (height // unit) * (width // unit)
                    cases[f"{case}_{k}"] = pixels[k : k + 1, :, :height, :width], [(height, width)], features[first:last], None
                    first = last
            else:
                pixels = pixels.reshape(-1, *pixels.shape[-3:])
                cases[case] = pixels, [pixels.shape[-2:]] * len(pixels), features, None
    save(source.name, config, tensors, cases)


# ---------------------------------------------------------------- checkpoints made here
def qwen(kind, vision):
    text = dict(TEXT, rope_scaling=dict(type="mrope", mrope_section=[2, 2, 2]))
    if kind == "qwen3_5":
        text = dict(TEXT, model_type="qwen3_5_text", head_dim=16, layer_types=["full_attention"], linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8,
                    rope_parameters=dict(mrope_interleaved=True, mrope_section=[1, 1, 0], rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25))
        return dict(model_type=kind, text_config=text, vision_config=dict(model_type=kind, **vision))
    return dict(model_type=kind, **text, vision_config=vision)  # flat, as on the hub


def gemma4(unified, **vision):
    kind = "gemma4_unified" if unified else "gemma4"
    ropes = dict(sliding_attention=dict(rope_type="default", rope_theta=1e4), full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6))
    text = dict(TEXT, model_type=kind + "_text", head_dim=16, global_head_dim=16, hidden_size_per_layer_input=0, layer_types=["full_attention"], rope_parameters=ropes)
    return dict(model_type=kind, text_config=text, vision_config=dict(model_type=kind + "_vision", rms_norm_eps=1e-6, pooling_kernel_size=3, **vision), audio_config=None)


BLOCK4 = dict(patch_size=4, hidden_size=36, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, head_dim=12, hidden_activation="gelu_pytorch_tanh", position_embedding_size=32,
              rope_parameters=dict(rope_theta=100.0))
INTERN = dict(model_type="internvl_vision", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=[24, 24], patch_size=[4, 4], hidden_act="gelu", layer_norm_eps=1e-6)
SIGLIP = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_channels=3, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)
QWEN2_TEXT = dict(TEXT, model_type="qwen2")
MADE = {
    "qwen2_5_vl": qwen("qwen2_5_vl", dict(depth=3, hidden_act="silu", hidden_size=32, intermediate_size=40, num_heads=2, in_chans=3, out_hidden_size=24, patch_size=4, spatial_merge_size=2, spatial_patch_size=4, window_size=16,
                                          fullatt_block_indexes=[1], tokens_per_second=2, temporal_patch_size=2)),
    "qwen2_vl": qwen("qwen2_vl", dict(depth=2, embed_dim=32, hidden_size=24, hidden_act="quick_gelu", mlp_ratio=2, num_heads=2, in_chans=3, patch_size=4, spatial_merge_size=2, spatial_patch_size=4, temporal_patch_size=2)),
    "qwen3_5": qwen("qwen3_5", dict(depth=2, hidden_size=24, hidden_act="gelu_pytorch_tanh", intermediate_size=40, num_heads=2, in_channels=3, out_hidden_size=24, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
                                    num_position_embeddings=36, deepstack_visual_indexes=[])),
    "gemma4": gemma4(False, **BLOCK4, standardize=True, use_clipped_linears=False),
    "gemma4_e": gemma4(False, **BLOCK4, standardize=False, use_clipped_linears=True),
    "gemma4_unified": gemma4(True, patch_size=4, mm_embed_dim=24, mm_posemb_size=16, output_proj_dims=24),
    "internvl": dict(model_type="internvl", text_config=QWEN2_TEXT, vision_config=dict(INTERN, attention_bias=True, use_qk_norm=False, norm_type="layer_norm"), downsample_ratio=0.5, projector_hidden_act="gelu"),
    "internvl_6b": dict(model_type="internvl", text_config=QWEN2_TEXT, vision_config=dict(INTERN, attention_bias=False, use_qk_norm=True, norm_type="rms_norm"), downsample_ratio=0.5, projector_hidden_act="gelu"),
    "lfm2_vl": dict(model_type="lfm2_vl", text_config=dict(TEXT, model_type="lfm2", layer_types=["full_attention"]), vision_config=dict(SIGLIP, model_type="siglip2_vision_model", patch_size=4, num_patches=36, vision_use_head=False),
                    projector_hidden_act="gelu", projector_hidden_size=40, projector_bias=True, projector_use_layernorm=True, downsample_factor=2),
    "idefics3": dict(model_type="idefics3", text_config=dict(TEXT, model_type="llama", rms_norm_eps=1e-5, pad_token_id=0), vision_config=dict(SIGLIP, model_type="idefics3_vision", image_size=38, patch_size=4), scale_factor=3, image_token_id=5, pad_token_id=0),
}
RENAMED = [("qwen2", "model.visual.", "visual."), ("internvl", "model.vision_tower.", "vision_tower."), ("internvl", "model.multi_modal_projector.", "multi_modal_projector."),
           ("lfm2_vl", "model.vision_tower.", "model.vision_tower.vision_model."), ("gemma4_unified", "model.embed_vision.multimodal_embedder.", "model.embed_vision."),
           ("gemma4_unified", "model.embed_vision.p", "model.vision_embedder.p")]
"""Families, and the prefixes of transformers 5 and of the hub."""
SIZES = {"qwen": [(40, 56), (24, 32)], "gemma4": [(36, 60), (48, 24)], "internvl": [(24, 24)] * 2, "lfm2_vl": [(16, 40), (32, 24)], "idefics3": [(38, 38)] * 2}


def fill(model, generator):
    """Random weights with which every part matters."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("input_min", "output_min")):
                tensor.copy_(-1 - noise.abs())
            elif name.endswith(("input_max", "output_max")):
                tensor.copy_(1 + noise.abs())
            elif name.endswith("std_scale"):
                tensor.copy_(0.3 + 0.05 * noise)
            elif "lambda_" in name:
                tensor.copy_(0.5 + 0.2 * noise)
            elif "pos" in name and "embed" in name and "norm" not in name:
                tensor.copy_(0.4 * noise)
            elif tensor.dim() == 1 and ("norm" in name or "ln" in name) and name.endswith("weight"):
                tensor.add_(0.1 * noise)
            elif "vis" in name or "projector" in name or "connector" in name:
                tensor.copy_((0.5 if name.endswith("std_bias") else 0.15) * noise)


@torch.no_grad()
def features(model, name, size, codes):
    """Return the pixels and features of one piece, whose patches are numbered row by row (Qwen: by squares)."""
    height, width = size
    if name.startswith(("internvl", "idefics3")):
        pixels = codes(1, 3, height, width)
        given = dict(pixel_values=pixels if name.startswith("internvl") else pixels[None])
        if name.startswith("internvl"):
            given |= dict(vision_feature_layer=-1, vision_feature_select_strategy="default")
    else:
        patch = 12 if name == "gemma4_unified" else 4
        rows, columns = height // patch, width // patch
        pixels = codes(rows * columns, 3 * patch * patch * (2 if name.startswith("qwen") else 1))
        if name.startswith("qwen"):
            given = dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, rows, columns]]))
        elif name.startswith("gemma4"):
            places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1).reshape(1, -1, 2)
            pixels = (pixels + 1) / 2
            given = dict(pixel_values=pixels[None], image_position_ids=places)
        else:
            given = dict(pixel_values=pixels[None], spatial_shapes=torch.tensor([[rows, columns]]), pixel_attention_mask=torch.ones(1, rows * columns))
    found = model.model.get_image_features(**given, return_dict=True).pooler_output
    found = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    return pixels.numpy(), found.reshape(-1, found.shape[-1]).numpy()


def made(name):
    config = MADE[name]
    target = GOLDEN / name
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(target)
    model = AutoModelForImageTextToText.from_config(read, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    fill(model, generator)
    tensors = {}
    for stored, tensor in model.state_dict().items():
        if any(part in stored for part in TOWER):
            for family, old, new in RENAMED:
                if name.startswith(family) and stored.startswith(old):
                    stored = new + stored.removeprefix(old)
            tensors[stored] = tensor.numpy().copy()
    sizes = next(SIZES[family] for family in SIZES if name.startswith(family))
    codes = lambda *shape: torch.randint(0, 256, shape, generator=generator) / 127.5 - 1
    pieces = [features(model, name, size, codes) for size in sizes]
    pixels, rows = (np.concatenate([piece[k] for piece in pieces]) for k in (0, 1))
    print(name, len(tensors), rows.shape, round(float(rows.std()), 3))
    save(name, config, tensors, {"two": (pixels, sizes, rows, None)})


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name in MADE]
    for directory in map(Path, (name for name in sys.argv[1:] if name not in MADE)):
        for name in REDUCED:
            reduced(directory / name)
    for name in names or MADE:
        made(name)
