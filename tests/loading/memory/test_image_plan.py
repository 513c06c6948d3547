"""The plan covers the tower, its activations and cached features, and says how large images may be."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest
from support.models.plain_weights import RandomWeights
from support.models.planned import MB, Tiny
from support.models.seeing import GOLDEN
from support.processes.active_memory import active_memory

from mlxinfer.engine.llm import LLM
from mlxinfer.errors import MemoryPlanError
from mlxinfer.loading.load import PreparedModel, meta_model
from mlxinfer.loading.memory.images import ImageMemory, TowerSize, image_memory
from mlxinfer.loading.memory.plan import MemoryPlan, plan_memory
from mlxinfer.models.towers import Tower, tower_of
from mlxinfer.nn.packing import settle
from mlxinfer.util.device import DeviceMemory
from mlxinfer.vision.processor import Budget, Layout


def planned(model: PreparedModel, megabytes: float, *, max_pixels: int | None = None, **options: Any) -> MemoryPlan:
    memory = DeviceMemory(int(2 * megabytes * MB), int(megabytes * MB))
    return plan_memory(model, images=image_memory(model.vision, max_pixels), memory=memory, **options)


@pytest.fixture(scope="module")
def qwen() -> PreparedModel:
    return meta_model(GOLDEN / "qwen3_vl", dtype="float32")


def test_the_parts_are_all_that_there_is(qwen: PreparedModel) -> None:
    plan = planned(qwen, 500)
    assert plan.images is not None
    assert plan.used + plan.left == plan.limit == 500 * MB
    assert plan.vision == plan.images.weights + plan.images.step + plan.images.features
    assert plan.images.weights == qwen.vision.weight_bytes  # type: ignore[union-attr]
    assert plan.images.features == 25 * MB
    assert plan.peak == plan.step + plan.images.step
    assert planned(qwen, 100_000).images.features == 10**9  # type: ignore[union-attr]


def test_a_plan_without_images_is_as_for_a_text_model(qwen: PreparedModel) -> None:
    """A model with a tower, planned without it, equals one that has no tower."""
    text = Tiny(qwen.model, qwen.weight_bytes, qwen.load_bytes, qwen.dtype)
    memory = DeviceMemory(1000 * MB, 500 * MB)
    assert plan_memory(qwen, memory=memory) == plan_memory(text, memory=memory)
    assert plan_memory(qwen, memory=memory).vision == 0


def test_the_models_own_limit_stays_while_memory_lasts(qwen: PreparedModel) -> None:
    images = planned(qwen, 4000).images
    assert images is not None
    assert (images.max_pixels, images.limited) == (None, False)
    assert images.pixels == 131072  # longest_edge of its preprocessor_config.json
    assert images.tokens == 128
    assert images.line() == "images up to 0.13 megapixels (128 tokens); larger ones are scaled down"
    assert images.budget(None) == Budget()


def test_short_memory_limits_images_and_says_so(qwen: PreparedModel) -> None:
    sizes = [planned(qwen, megabytes).images for megabytes in (26, 40, 60, 4000)]
    areas = [images.pixels for images in sizes if images]
    assert areas == sorted(areas)
    assert areas[0] < areas[-1] == 131072
    first = sizes[0]
    assert first is not None
    assert first.limited
    assert first.max_pixels is not None
    for size in ((4000, 3000), (300, 9000), (8000, 8000)):
        height, width = qwen.vision.processor.plan(size, first.budget(None)).resized  # type: ignore[union-attr]
        assert height * width <= first.max_pixels
    with LLM(GOLDEN / "qwen3_vl", memory_gb=0.04, dtype="float32") as llm:
        assert llm.plan.images is not None
        assert llm.plan.images.line() in llm.notes
        assert llm.engine.config.image_features_bytes == llm.plan.images.features


def test_an_image_fits_in_the_context(qwen: PreparedModel) -> None:
    images = planned(qwen, 4000, max_context=100).images
    assert images is not None
    assert images.limited
    assert 0 < images.tokens <= 75


def test_the_callers_limit_can_be_above_the_models(qwen: PreparedModel) -> None:
    small, large = (planned(qwen, 4000, max_pixels=pixels).images for pixels in (40_000, 400_000))
    assert small is not None
    assert large is not None
    assert small.pixels <= small.max_pixels == 40_000
    assert not small.limited
    assert 131072 < large.pixels <= large.max_pixels == 400_000
    assert large.step > small.step


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gemma4_unified"])
def test_a_step_has_room_for_an_image_that_is_not_divided(family: str) -> None:
    model = meta_model(GOLDEN / family, dtype="float32")
    images = image_memory(model.vision)
    assert images is not None
    plan, text = planned(model, 1000), plan_memory(model, memory_gb=1)
    assert 0 < images.span() <= max(plan.rows, images.span())
    assert plan.rows == text.rows, "steps of text are as without images"
    assert plan.step > text.step
    assert plan.images is not None
    assert plan.images.tokens <= max(plan.rows, images.span())


def test_gemma_4_reaches_its_larger_budgets_when_asked() -> None:
    model = meta_model(GOLDEN / "gemma4", dtype="float32")
    usual, large = planned(model, 2000), planned(model, 2000, max_pixels=10**9)
    assert usual.images is not None
    assert large.images is not None
    assert not usual.images.limited
    assert usual.rows <= large.rows


def test_a_model_that_fits_only_without_its_tower_says_so() -> None:
    model = meta_model(GOLDEN / "qwen3_vl", dtype="float32")
    with pytest.raises(MemoryPlanError, match=r"images 0\.0\d+\)\. Load it without images \(--no-vision\)\. Use a smaller"):
        planned(model, 24)


CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "smolvlm": (
        {
            "scale_factor": 4,
            "text_config": {"hidden_size": 96},
            "vision_config": {
                "hidden_size": 192,
                "intermediate_size": 768,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "image_size": 512,
                "patch_size": 16,
            },
        },
        (1, 3, 512, 512),
    ),
    "qwen3_vl": (
        {
            "text_config": {"hidden_size": 256},
            "vision_config": {
                "depth": 2,
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_heads": 2,
                "out_hidden_size": 256,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [0],
            },
        },
        (1024, 1536),
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_bound_holds(family: str) -> None:
    """The measured peak of a tower of a real image is below the planned one, and not far."""
    config, shape = CONFIGS[family]
    tower = _random_tower(config | {"model_type": family})
    pixels = mx.zeros(shape)
    mx.eval(pixels)
    before = active_memory()
    mx.reset_peak_memory()
    stages, found = tower.stages(pixels, [(512, 512)]), None
    while found is None:
        try:
            mx.eval(next(stages))
        except StopIteration as end:
            found = end.value
    mx.eval(found.features, found.deepstack)
    layout = Layout((512, 512), ((512, 512),), (1, 1), ((512, 512),), (found.features.shape[0],))
    bound = TowerSize(tower, mx.float32).bytes(layout)
    peak = mx.get_peak_memory() - before
    # Less is in memory at once on a busy machine, which frees one operation's arrays before it starts the next one.
    assert bound / 6 < peak < bound


def _random_tower(config: dict[str, Any]) -> Tower:
    tower = tower_of(config, RandomWeights())
    settle(tower)
    return tower


def test_span_is_the_processors(qwen: PreparedModel) -> None:
    settings = json.loads((GOLDEN / "gemma3" / "processor_config.json").read_text())
    gemma = meta_model(GOLDEN / "gemma3").vision
    assert not isinstance(gemma, str)
    assert ImageMemory(gemma).span() == settings["image_seq_length"]
