"""Writes tests/golden/vision: tiny random checkpoints of models that see, with what transformers computes for them in float32.

    PYTHONPATH=. python tests/golden/vision/make_vision.py [FAMILY ...]

Needs torch, torchvision, transformers 5.24, pillow and num2words. A family's folder has its config, processor and tokenizer files, with
keys and values as on the hub. Made are `model.safetensors` (random values that bfloat16 holds, named as on the hub) and `reference.npz`:

cases                       names of the cases (JSON): "one" image, "two" of odd sizes, several "turns", and "text" or a small image
C_messages, C_prompt        messages (JSON; images in order) and the prompt as the chat template renders it, before images are expanded
C_image_0 ...               uint8 [height, width, 3]
C_input_ids                 of the expanded prompt
C_pixels, C_pixel_codes     SHA-256 of the pixel values (float32, C order, without padding); the pixels as uint8 where no Pil class exists
C_position_ids, C_rope_delta, C_image_grid_thw, C_image_sizes       as the processor and `get_rope_index` return them
C_features, C_deepstack     rows that replace placeholders [rows, hidden] and [layers, rows, hidden] ("one" and "two")
C_logits                    every `STRIDE`th logit of every row ("one" and "two")
C_greedy, C_logprobs        16 greedy tokens and their logarithmic probabilities

Pixels come from the Pil image processors. LFM2-VL and Gemma 4 12B have none: there mlxinfer's pixels are used, if near those of torchvision
(tests/vision/test_families_transformers.py compares more sizes).
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

GOLDEN = Path(__file__).parent
STRIDE = 5
SIZES = {
    "smolvlm": ([(135, 97)], [(201, 75), (67, 129)], [(35, 41)]),
    "mistral3": ([(119, 187)], [(203, 301), (45, 129)], []),
    "qwen3_vl": ([(119, 187)], [(303, 95), (271, 433)], []),
    "qwen3_5": ([(151, 189)], [(301, 99), (255, 377)], []),
    "qwen2": ([(193, 251)], [(31, 45), (289, 401)], []),
    "gemma3": ([(123, 177)], [(211, 87), (83, 259)], []),
    "gemma4": ([(141, 203)], [(91, 311), (225, 113)], []),
    "internvl": ([(141, 203)], [(50, 311), (225, 113)], [(64, 64)]),
    "lfm2_vl": ([(77, 83)], [(49, 61), (225, 157)], []),
}
"""Heights and widths of the images of the cases "one", "two" and the last, by the beginning of the family's name."""
ALIKE = {"idefics3": "smolvlm", "ministral3": "mistral3"}
ANSWER = 16
TURNS = [(65, 131), (131, 77)]
SEEDS = {"gemma4": 13, "idefics3": 17, "internvl": 16, "lfm2_vl": 26, "ministral3": 17, "mistral3": 18, "qwen2_5_vl": 8, "qwen2_vl": 20}
SEEDS |= {"qwen3_5": 17, "qwen3_5_moe": 10, "qwen3_vl": 20, "qwen3_vl_moe": 9}
"""Seeds of families whose first one gives ties, placeholders or few different tokens in greedy answers."""


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """Gradients, a circle, a square, lines and a little noise: uint8 [height, width, 3]."""
    r = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    image = np.stack([255 * x / width, 255 * y / height, 128 + 100 * np.sin((x + y) / r.uniform(5, 25))], -1)
    cy, cx, radius = r.uniform(0.2, 0.8) * height, r.uniform(0.2, 0.8) * width, r.uniform(0.15, 0.35) * min(height, width)
    image[(y - cy) ** 2 + (x - cx) ** 2 < radius**2] = r.integers(0, 256, 3)
    top, left, side = int(r.uniform(0, 0.6) * height), int(r.uniform(0, 0.6) * width), int(0.3 * min(height, width))
    image[top : top + side, left : left + side] = r.integers(0, 256, 3)
    image[::7, :, 0] *= 0.5
    image[: height // 4, : width // 4] += r.integers(-40, 41, (height // 4, width // 4, 3))
    return np.clip(np.round(image), 0, 255).astype(np.uint8)


def messages_of(case: str, count: int) -> list[dict]:
    def text(words: str) -> dict:
        return {"type": "text", "text": words}

    image = {"type": "image"}
    if case == "two":
        parts = [image, text("the first picture, then the second:"), image, text("what is in the second picture?")]
        return [{"role": "user", "content": parts}]
    if case == "turns":
        asked, answered = [image, text("what is this?")], [text("a red circle")]
        last = [text("and this one?"), image]
        return [{"role": role, "content": parts} for role, parts in (("user", asked), ("assistant", answered), ("user", last))]
    return [{"role": "user", "content": [image] * count + [text("describe the image in one sentence.")]}]


def fill(model: torch.nn.Module, seed: int) -> None:
    """Set random weights with which every part matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in name for part in ("A_log", "dt_bias", "inv_freq", "embed_scale")):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("input_min", "output_min", "input_max", "output_max")):
            noise = (1 + noise.abs()) * (-1 if name.endswith("min") else 1)
        elif "lambda_" in name:
            noise = 0.5 + 0.2 * noise
        elif name.endswith("std_scale"):
            noise = 0.3 + 0.05 * noise
        elif name.endswith("layer_scalar"):
            noise = 1 + 0.1 * noise
        elif "position_embedding" in name or "pos_embed" in name:
            noise *= 0.4
        elif name.endswith("std_bias"):
            noise *= 0.5
        elif tensor.dim() == 1 and ("norm" in name or "ln_" in name or "_ln" in name):
            noise = tensor + 0.1 * noise
        else:
            noise *= 0.1 if tensor.dim() < 2 or tensor.shape[-1] <= 512 else 0.03
        if tensor.dtype.is_floating_point and (tensor.dim() or not name.endswith("scale")):
            tensor.copy_(noise)


def head_of(config: dict, tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of a head for drafts (Qwen 3.5), whose layer is like the model's last. transformers ignores these."""
    text = config.get("text_config", {})
    if not text.get("mtp_num_hidden_layers"):
        return {}
    size, last = text["hidden_size"], f"model.language_model.layers.{text['num_hidden_layers'] - 1}."
    shapes = {f"mtp.layers.0.{name.removeprefix(last)}": tensor.shape for name, tensor in tensors.items() if name.startswith(last)}
    shapes |= {"mtp.fc.weight": (size, 2 * size), "mtp.norm.weight": (size,)}
    shapes |= {f"mtp.pre_fc_norm_{part}.weight": (size,) for part in ("embedding", "hidden")}
    generator = torch.Generator().manual_seed(seed + 1)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_checkpoint(target: Path, seed: int) -> torch.nn.Module:
    """Write `model.safetensors`, and return the model that transformers reads from it."""
    torch.manual_seed(seed)  # for what `fill` leaves as it is
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(target)).float().eval()
    fill(model, seed)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tensors = load_file(Path(directory) / "model.safetensors")
    if any(".experts.0." in name for name in tensors):  # the hub's have an array for all experts
        tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        tensors |= {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
    tensors |= head_of(json.loads((target / "config.json").read_text()), tensors, seed)
    siglip = "vision_tower.vision_model." if target.name in ("gemma3", "lfm2_vl") else "vision_tower."
    stored = {name.replace("vision_tower.", siglip): tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, info = AutoModelForImageTextToText.from_pretrained(target, **options)
    problems = {key: found for key, found in info.items() if found and key != "error_msgs"}
    assert not problems, problems
    return model.eval()


def processor_of(target: Path, config: dict):
    """Return the family's processor, with Pillow's image processor if transformers has one."""
    name = config["model_type"]
    if not name.startswith("gemma4"):
        processor = AutoProcessor.from_pretrained(target)
        pil = getattr(transformers, type(processor.image_processor).__name__ + "Pil", None)
        if pil:
            processor.image_processor = pil.from_pretrained(target)
        return processor
    module = __import__(f"transformers.models.{name}", fromlist=["x"])  # without audio, which the fixtures lack
    base = "Gemma4Unified" if "unified" in name else "Gemma4"
    files = json.loads((target / "processor_config.json").read_text())
    image = {key: value for key, value in files["image_processor"].items() if key not in ("image_processor_type", "image_seq_length")}
    found = getattr(transformers, base + "ImageProcessorPil", None) or getattr(module, base + "ImageProcessor")
    tokenizer = AutoTokenizer.from_pretrained(target)
    parts = getattr(module, base + "AudioFeatureExtractor")(), found(**image), tokenizer, getattr(module, base + "VideoProcessor")()
    return getattr(module, base + "Processor")(*parts, chat_template=tokenizer.chat_template, image_seq_length=files["image_seq_length"])


def our_pixels(target: Path, images: list[np.ndarray], inputs: dict) -> list[np.ndarray]:
    """Replace the pixel values by mlxinfer's, and return their codes. Raises AssertionError unless both are close."""
    from mlxinfer.vision.families import open_processor
    from mlxinfer.vision.picture import read_picture

    processor, values = open_processor(target), inputs["pixel_values"]
    found = [processor.pixels(read_picture(image)) for image in images]
    rows = np.concatenate([each.normalized().reshape(-1, values.shape[-1]) for each in found])
    used = inputs["pixel_attention_mask"].bool() if "pixel_attention_mask" in inputs else inputs["image_position_ids"][..., 0] >= 0
    assert used.sum() == len(rows)
    assert np.abs(values[used].numpy() - rows).mean() * 255 < 1
    values[used] = torch.from_numpy(rows)
    return [each.values for each in found]


def unpadded(inputs: dict) -> bytes:
    """Return the pixel values without those that pad images to one size."""
    values = inputs["pixel_values"].numpy()
    if "image_position_ids" in inputs:
        values = values[inputs["image_position_ids"][..., 0].numpy() >= 0]
    if "image_sizes" in inputs:
        sizes = inputs["image_sizes"].tolist()
        return b"".join(image[:, :height, :width].tobytes() for image, (height, width) in zip(values, sizes))
    return values.tobytes()


def inputs_of(target: Path, processor, case: str, images: list[np.ndarray], arrays: dict[str, np.ndarray]) -> dict:
    """Run the processor, and add what is kept of its results to `arrays`."""
    messages = messages_of(case, len(images))
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    given = [Image.fromarray(image) for image in images]
    flat = type(processor).__name__.startswith(("Qwen", "InternVL", "Pixtral"))
    options = {"padding": False} if target.name.startswith("gemma4") else {}
    inputs = dict(processor(text=[prompt], images=(given if flat else [given]) if given else None, return_tensors="pt", **options))
    inputs.pop("attention_mask", None)
    kept = {key: np.asarray(value) for key, value in inputs.items() if key in ("image_grid_thw", "image_sizes")}
    if images and target.name in ("lfm2_vl", "gemma4_unified"):
        kept["pixel_codes"] = np.concatenate([codes.reshape(-1) for codes in our_pixels(target, images, inputs)])
    elif images:
        kept["pixels"] = np.array(hashlib.sha256(unpadded(inputs)).hexdigest())
    kept |= {
        "messages": np.array(json.dumps(messages)),
        "prompt": np.array(prompt),
        "input_ids": inputs["input_ids"][0].numpy().astype(np.int32),
    }
    kept |= {f"image_{number}": image for number, image in enumerate(images)}
    arrays |= {f"{case}_{key}": value.astype(np.int32) if value.dtype == np.int64 else value for key, value in kept.items()}
    return inputs


NOT_READ = {"num_crops", "num_soft_tokens_per_image", "image_rows", "image_cols", "rows", "cols", "num_patches"}
PIXELS = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids", "spatial_shapes", "pixel_attention_mask")


def run_model(model, family: str, case: str, inputs: dict, arrays: dict[str, np.ndarray]) -> str:
    """Add positions, features, logits and the greedy answer. Returns a line about the case."""
    if not family.startswith("gemma"):
        inputs.pop("token_type_ids", None)
    if not family.startswith(("gemma", "qwen")):
        inputs.pop("mm_token_type_ids", None)
    forward, ids = {key: value for key, value in inputs.items() if key not in NOT_READ}, inputs["input_ids"]
    if "mm_token_type_ids" in inputs and "image_grid_thw" in inputs:
        place, delta = model.model.get_rope_index(
            ids, mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        arrays |= {
            f"{case}_position_ids": place[:, 0].numpy().astype(np.int32),
            f"{case}_rope_delta": delta.numpy().astype(np.int32).reshape(-1),
        }
    logits = model(**forward, use_cache=False).logits[0]
    options = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    new = model.generate(**forward, **options)[0, ids.shape[1] :]
    special = {
        value
        for key, value in model.config.to_dict().items()
        if key.endswith(("_token_id", "_token_index")) and key[:3] not in ("eos", "bos", "pad")
    }
    assert not special & set(new.tolist()), f"{family} {case}: the answer has placeholders: choose another seed"
    longer = dict(forward, input_ids=torch.cat([ids, new[None, :-1]], 1))
    for key in {"mm_token_type_ids", "token_type_ids"} & longer.keys():
        longer[key] = torch.cat([longer[key], torch.zeros_like(new[None, :-1])], 1)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    rows = model(**longer, use_cache=False).logits[0, len(logits) - 1 :]
    assert (rows.argmax(-1) == new).all(), "the cache changes the answer"
    margin = torch.diff(rows.sort(-1).values[:, -2:], dim=-1).min().item()
    arrays |= {f"{case}_greedy": new.numpy().astype(np.int32), f"{case}_logprobs": rows.log_softmax(-1).max(-1).values.numpy()}
    if case in ("one", "two"):
        found = model.model.get_image_features(**{key: forward[key] for key in PIXELS if key in forward}, return_dict=True)
        joined = found.pooler_output if isinstance(found.pooler_output, torch.Tensor) else torch.cat(list(found.pooler_output))
        arrays |= {f"{case}_features": joined.reshape(-1, joined.shape[-1]).numpy(), f"{case}_logits": logits[:, ::STRIDE].numpy()}
        deepstack = getattr(found, "deepstack_features", None)
        if deepstack:
            parts = [part if isinstance(part, torch.Tensor) else torch.cat(list(part)) for part in deepstack]
            arrays[f"{case}_deepstack"] = torch.stack(parts).numpy()
    assert margin > 1e-3, f"{family} {case}: two tokens are nearly equal ({margin:.5f}): choose another seed"
    return f"{case}: {ids.shape[1]} tokens, margin {margin:.3f}"


@torch.no_grad()
def make(family: str) -> None:
    target = GOLDEN / family
    seed = SEEDS.get(family, 7)
    model, processor = make_checkpoint(target, seed), processor_of(target, json.loads((target / "config.json").read_text()))
    sizes = next(found for start, found in SIZES.items() if ALIKE.get(family, family).startswith(start))
    last = ("square" if family == "internvl" else "small") if sizes[2] else "text"
    cases = {"one": sizes[0], "two": sizes[1], last: sizes[2], "turns": TURNS}
    arrays, about = {"cases": np.array(json.dumps(list(cases)))}, []
    for case, shapes in cases.items():
        images = [picture(*shape, seed=700 + 7 * number + len(case)) for number, shape in enumerate(shapes)]
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        inputs = inputs_of(target, processor, case, images, arrays)
        about.append(run_model(model, family, case, inputs, arrays))
    np.savez_compressed(target / "reference.npz", **arrays)
    total = sum(file.stat().st_size for file in target.iterdir()) // 1024
    print(family, f"{total} KiB;", "; ".join(about), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[1:] or sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "tokenizer.json").is_file()):
        make(family)
