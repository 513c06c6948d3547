"""Layouts, prompts and pixels of random sizes equal those of transformers' Pil image processors and processor classes.

Families without a Pil class are compared with the class that needs torchvision, within the rounding of its resizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxinfer.errors import ImageError
from mlxinfer.vision.families import PROCESSORS
from mlxinfer.vision.picture import read_picture
from mlxinfer.vision.processor import CLIP_MEAN, CLIP_STD, Budget, ImageProcessor, Pixels, ProcessorConfig, ProcessorFiles

CLIP = {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD), "resample": 3}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
ODD_SIZES = [
    (1, 1),
    (1, 200),
    (200, 1),
    (3000, 17),
    (17, 3000),
    (64, 64),
    (128, 64),
    (63, 65),
    (3, 1),
    (1, 3),
    (2, 5),
    (448, 448),
    (640, 480),
]
SIZES = 200


def processor_of(kind: str, image: Mapping[str, Any], prompt: Mapping[str, Any] | None = None) -> ImageProcessor:
    """The processor of a `model_type` with these settings."""
    configs = ProcessorConfig(Path("image"), image), ProcessorConfig(Path("prompt"), prompt or {})
    return PROCESSORS[kind](ProcessorFiles(*configs, {}, {"image_token_id": 5}))


def sizes_of(seed: int, most: int = 330) -> list[tuple[int, int]]:
    r = np.random.default_rng(seed)
    drawn = np.exp(r.uniform(0, np.log(most), (SIZES, 2))).astype(int) + 1
    return ODD_SIZES + [(int(height), int(width)) for height, width in drawn]


def image_of(size: tuple[int, int], seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


_Oracle = Callable[[np.ndarray[Any, Any]], tuple[np.ndarray[Any, Any], str]]
"""From an image to float32 pixel values without padding, and the text that replaces its placeholder."""


def _tiles(family: str, config: Mapping[str, Any], count: int) -> _Oracle:
    name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[family]
    pil = _class(f"{family}.image_processing_pil_{family}", f"{name}ImageProcessorPil")(**config)
    text = _class(f"{family}.processing_{family}", f"{name}Processor").replace_image_token
    names = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
    names |= dict.fromkeys(("global_image_token", "global_image_tag"), "<global-img>")
    owner = SimpleNamespace(image_seq_len=count, **names)

    def oracle(image: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        out = pil([[image]], return_row_col_info=True, input_data_format="channels_last")
        return np.stack(out["pixel_values"][0]), text(owner, {"rows": out["rows"], "cols": out["cols"]}, 0)

    return oracle


def _qwen(config: Mapping[str, Any]) -> _Oracle:
    pil = _class("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")(**config)
    text = _class("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor").replace_image_token
    owner = SimpleNamespace(image_processor=pil, image_token="<|image_pad|>")

    def oracle(image: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        out = pil([image], input_data_format="channels_last")
        return out["pixel_values"], text(owner, out, 0)

    return oracle


def _pixtral(config: Mapping[str, Any], unit: int) -> _Oracle:
    pil = _class("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil")(**config)

    def oracle(image: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        out = pil([image], patch_size=unit, input_data_format="channels_last")
        height, width = out["image_sizes"][0]
        tokens = [*["[IMG]"] * (width // unit), "[IMG_BREAK]"] * (height // unit)
        return np.stack(out["pixel_values"]), "".join([*tokens[:-1], "[IMG_END]"])

    return oracle


def _gemma3(config: Mapping[str, Any], count: int) -> _Oracle:
    pil = _class("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")(**config)
    text = _class("gemma3.processing_gemma3", "Gemma3Processor").replace_image_token
    owner = SimpleNamespace(full_image_sequence=f"\n\n<start_of_image>{'<image_soft_token>' * count}<end_of_image>\n\n")

    def oracle(image: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        out = pil([image], input_data_format="channels_last")
        return np.stack(out["pixel_values"]), text(owner, out, 0)

    return oracle


def _gemma4(config: Mapping[str, Any]) -> _Oracle:
    pil = _class("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil")(**config)
    text = _class("gemma4.processing_gemma4", "Gemma4Processor").replace_image_token
    owner = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")

    def oracle(image: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        out = pil([image], input_data_format="channels_last")
        used = out["image_position_ids"][0][:, 0] >= 0
        return out["pixel_values"][0][used], text(owner, out, 0)

    return oracle


def _internvl(config: Mapping[str, Any], count: int) -> _Oracle:
    pil = _class("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")(**config)
    text = _class("internvl.processing_internvl", "InternVLProcessor").replace_image_token
    owner = SimpleNamespace(start_image_token="<img>", image_token="<IMG_CONTEXT>", end_image_token="</img>", image_seq_length=count)

    def oracle(image: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        out = pil([image], crop_to_patches=True, input_data_format="channels_last")
        return np.stack(out["pixel_values"]), text(owner, out, 0)

    return oracle


SMOL = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "resample": 1, **HALF}
QWEN3 = {"size": {"shortest_edge": 4096, "longest_edge": 32768}, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, **HALF}
QWEN25 = {"min_pixels": 3136, "max_pixels": 25088, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **CLIP}
PIXTRAL = {"size": {"longest_edge": 224}, "patch_size": 14, **CLIP}
GEMMA3 = {"size": {"height": 84, "width": 98}, "resample": 2, **HALF}
GEMMA4 = {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}
INTERN = {"size": {"height": 28, "width": 28}, "crop_to_patches": False, "min_patches": 1, "max_patches": 12, **CLIP}
FAMILIES: dict[str, tuple[str, Callable[[], ImageProcessor], Callable[[], _Oracle]]] = {
    "smolvlm": ("<image>", lambda: processor_of("smolvlm", SMOL, {"image_seq_len": 4}), lambda: _tiles("smolvlm", SMOL, 4)),
    "smolvlm whole": (
        "<image>",
        lambda: processor_of("smolvlm", {**SMOL, "do_image_splitting": False}, {"image_seq_len": 4}),
        lambda: _tiles("smolvlm", {**SMOL, "do_image_splitting": False}, 4),
    ),
    "idefics3": ("<image>", lambda: processor_of("idefics3", SMOL, {"image_seq_len": 9}), lambda: _tiles("idefics3", SMOL, 9)),
    "qwen3_vl": ("<|image_pad|>", lambda: processor_of("qwen3_vl", QWEN3), lambda: _qwen(QWEN3)),
    "qwen2_5_vl": ("<|image_pad|>", lambda: processor_of("qwen2_5_vl", QWEN25), lambda: _qwen(QWEN25)),
    "mistral3": (
        "[IMG]",
        lambda: processor_of("mistral3", PIXTRAL, {"patch_size": 14, "spatial_merge_size": 2}),
        lambda: _pixtral(PIXTRAL, 28),
    ),
    "gemma3": ("<image_soft_token>", lambda: processor_of("gemma3", GEMMA3, {"image_seq_length": 6}), lambda: _gemma3(GEMMA3, 6)),
    "gemma4": ("<|image|>", lambda: processor_of("gemma4", GEMMA4), lambda: _gemma4(GEMMA4)),
    "internvl": ("<IMG_CONTEXT>", lambda: processor_of("internvl", INTERN, {"image_seq_length": 4}), lambda: _internvl(INTERN, 4)),
}


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_random_sizes(family: str) -> None:
    token, make, make_oracle = FAMILIES[family]
    processor, oracle = make(), make_oracle()
    refused = 0
    for number, size in enumerate(sizes_of(len(family))):
        image = image_of(size, number)
        try:
            layout = processor.plan(size)
        except ImageError:
            with pytest.raises(ValueError):
                oracle(image)
            refused += 1
            continue
        if family == "mistral3" and max(size) / min(size) > 224:  # transformers fails on an image without height or width
            continue
        values, text = oracle(image)
        found = processor.pixels(read_picture(image))
        assert found.layout == layout, size
        assert processor.expansion(layout) == text, size
        assert layout.tokens == text.count(token), size
        normalized = found.normalized()
        assert normalized.dtype == values.dtype == np.float32, size
        assert np.array_equal(normalized, values), size
    assert refused <= 3


@pytest.mark.torch
@pytest.mark.parametrize("area", [32768 - 1, 32768, 32768 + 1, 4096 - 1, 4096, 4096 + 1])
def test_qwen_at_the_limits_of_the_area(area: int) -> None:
    processor, oracle = processor_of("qwen3_vl", QWEN3), _qwen(QWEN3)
    for width in (1, 32, 64, 100, 181, 256):
        size = area // width, width
        if max(size) / min(size) <= 200:
            assert np.array_equal(processor.pixels(read_picture(image_of(size, width))).normalized(), oracle(image_of(size, width))[0]), (
                size
            )


@pytest.mark.torch
@pytest.mark.parametrize("budget", [70, 140, 280, 560, 1120])
def test_gemma4_budgets(budget: int) -> None:
    config = {**GEMMA4, "max_soft_tokens": budget}
    processor, oracle = processor_of("gemma4", config), _gemma4(config)
    for number, size in enumerate([(31, 47), (500, 300), (17, 3000), (1024, 1024)]):
        image = image_of(size, number)
        found = processor.pixels(read_picture(image))
        assert processor.expansion(found.layout) == oracle(image)[1]
        assert np.array_equal(found.normalized(), oracle(image)[0])


@pytest.mark.torch
def test_gemma4_unified_takes_the_same_pixels_in_larger_patches() -> None:
    small, large = processor_of("gemma4", GEMMA4), processor_of("gemma4_unified", GEMMA4)
    picture = read_picture(image_of((61, 143), 0))
    rows, columns = small.plan(picture.size).grid or (0, 0)
    patches = small.pixels(picture).normalized().reshape(rows, 3, columns, 3, 4, 4, 3)
    merged = patches.transpose(0, 2, 1, 4, 3, 5, 6).reshape(rows * columns, -1)
    assert np.array_equal(large.pixels(picture).normalized(), merged)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["smolvlm", "internvl"])
def test_real_tile_sizes(family: str) -> None:
    if family == "smolvlm":
        config: dict[str, Any] = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "resample": 1, **HALF}
        processor, oracle, tokens = processor_of("smolvlm", config, {"image_seq_len": 64}), _tiles("smolvlm", config, 64), 13 * 64
    else:
        config = {"size": {"height": 448, "width": 448}, **CLIP}
        processor, oracle, tokens = processor_of("internvl", config), _internvl(config, 256), 13 * 256
    image = image_of((480, 640), 1)
    found = processor.pixels(read_picture(image))
    assert found.layout.tokens == tokens
    assert np.array_equal(found.normalized(), oracle(image)[0])
    assert processor.plan((480, 640), Budget(detail="low")).pieces == (found.layout.pieces[0],)


LFM2_TILES = {
    "min_tiles": 2,
    "max_tiles": 6,
    "tile_size": 64,
    "max_pixels_tolerance": 2.0,
    "use_thumbnail": True,
    "do_image_splitting": True,
}
LFM2_ROWS = {"encoder_patch_size": 8, "downsample_factor": 2, "min_image_tokens": 4, "max_image_tokens": 16}
LFM2 = {**LFM2_TILES, **LFM2_ROWS, "resample": 2, **HALF}


def assert_near(found: Pixels, wanted: np.ndarray[Any, Any], scale: float) -> None:
    """Values differ by two levels of 255 at most, or eight where the picture is enlarged: torchvision's resizer rounds differently."""
    difference = np.abs(found.normalized() - wanted) * scale
    enlarged = any(new > old for new, old in zip(found.layout.resized, found.layout.size, strict=True))
    assert difference.max() < (8.1 if enlarged else 2.1), found.layout
    assert difference.mean() < 0.6, found.layout


@pytest.mark.torch
@pytest.mark.parametrize("settings", [{}, {"do_image_splitting": False}, {"use_thumbnail": False}], ids=["tiles", "whole", "no thumbnail"])
def test_lfm2_vl(settings: dict[str, Any]) -> None:
    pytest.importorskip("torchvision")
    config = {**LFM2, **settings}
    theirs, ours = _class("lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor")(**config), processor_of("lfm2_vl", config)
    kind = _class("lfm2_vl.processing_lfm2_vl", "Lfm2VlProcessor")
    tokens = {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
    owner = SimpleNamespace(image_processor=theirs, image_thumbnail_token="<|img_thumbnail|>", **tokens)
    for name in ("_get_image_num_tokens", "_build_image_tokens", "_compute_tokens_per_tile", "_compute_tokens_for_image"):
        setattr(owner, name, getattr(kind, name).__get__(owner))
    for number, size in enumerate(sizes_of(1)):
        if max(size) / min(size) > 8:  # transformers fails: more patches than it pads to
            continue
        out = theirs([[np.ascontiguousarray(image_of(size, number))]], return_row_col_info=True, input_data_format="channels_last")
        found = ours.pixels(read_picture(image_of(size, number)))
        assert ours.expansion(found.layout) == kind.replace_image_token(owner, out, 0, use_image_special_tokens=True), size
        used = np.asarray(out["pixel_attention_mask"]).astype(bool)
        wanted = np.asarray(out["pixel_values"])[used]
        assert_near(found, wanted, 127.5)


@pytest.mark.torch
def test_gemma4_unified() -> None:
    pytest.importorskip("torchvision")
    theirs = _class("gemma4_unified.image_processing_gemma4_unified", "Gemma4UnifiedImageProcessor")(**GEMMA4)
    ours = processor_of("gemma4_unified", GEMMA4)
    owner = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    text = _class("gemma4_unified.processing_gemma4_unified", "Gemma4UnifiedProcessor").replace_image_token
    for number, size in enumerate(sizes_of(2)):
        image = image_of(size, number) // 2 + 64  # without values that Pillow clips between its two passes
        out = theirs([image], input_data_format="channels_last")
        found = ours.pixels(read_picture(image))
        assert ours.expansion(found.layout) == text(owner, out, 0), size
        positions = np.asarray(out["image_position_ids"])[0]
        rows, columns = found.layout.grid or (0, 0)
        assert positions[: rows * columns].tolist() == [[x, y] for y in range(rows) for x in range(columns)]
        assert_near(found, np.asarray(out["pixel_values"])[0][: rows * columns], 255)
