"""Arrays that are cached for the whole process are evaluated at creation, because another thread may use them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.cache import recent_rows as recent
from mlxinfer.cache import replayable_step as steady
from mlxinfer.cache.base import AttentionSpec
from mlxinfer.kernels_metal.add_norm import launcher as add_norm
from mlxinfer.kernels_metal.append_rows import launcher as append_rows
from mlxinfer.kernels_metal.paged_attention import arrays
from mlxinfer.kernels_metal.router import launcher as router
from mlxinfer.nn import gated_delta

ROOT = Path(__file__).parents[2]
KEPT: dict[str, Callable[[], mx.array]] = {
    "kernels_metal/paged_attention/arrays.py:settings": lambda: arrays.settings(0.125, 30.0, True, True),
    "kernels_metal/paged_attention/arrays.py:nothing": lambda: arrays.nothing(mx.bfloat16),
    "kernels_metal/add_norm/launcher.py:_epsilons_and_factors": lambda: add_norm._epsilons_and_factors(1e-5, 1e-6, 0.5, 2.0),
    "kernels_metal/router/launcher.py:_settings": lambda: router._settings(0.5, 1e-20, 2.5),
    "kernels_metal/append_rows/launcher.py:_settings": lambda: append_rows._settings(0.5, 1e-6, 1.0),
    "kernels_metal/paged_attention/arrays.py:cached_integers": lambda: arrays.cached_integers(1, 2, 3),
    "mlxinfer/cache/recent_rows.py:_heads": lambda: recent._heads(3),
    "mlxinfer/cache/replayable_step.py:_blank": lambda: steady._blank(AttentionSpec(2, 8, 8), mx.bfloat16, 1, 16)[0],
    "mlxinfer/cache/replayable_step.py:_nothing": lambda: steady._nothing(),
    "mlxinfer/nn/gated_delta.py:_equal_weights": lambda: gated_delta._equal_weights(8, 0.5),
    "mlxinfer/cache/recent_rows.py:_places": lambda: recent._places(((0, 1, 3),))[0],
}


def in_a_new_thread(use: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(use).result()


def test_an_array_belongs_to_the_stream_of_its_thread_until_it_is_evaluated() -> None:
    """The error that the next test would find."""
    mx.default_stream(mx.cpu)  # the first stream of a process is this thread's, as it is wherever anything was computed before
    made: list[mx.array] = []
    in_a_new_thread(lambda: made.append(mx.zeros((8,))))
    with pytest.raises(RuntimeError, match="Stream"):
        in_a_new_thread(lambda: mx.eval(made[0] + 1))


@pytest.mark.parametrize("name", KEPT)
def test_made_in_one_thread_and_used_in_another(name: str) -> None:
    kept_here = (add_norm._epsilons_and_factors, append_rows._settings, router._settings)
    for keeper in (arrays.settings, arrays.nothing, arrays.cached_integers, *kept_here):
        keeper.cache_clear()
    recent._heads.cache_clear()
    recent._places.cache_clear()
    steady._blank.cache_clear()
    steady._nothing.cache_clear()
    gated_delta._equal_weights.cache_clear()
    in_a_new_thread(lambda: KEPT[name]() is None)
    in_a_new_thread(lambda: mx.eval(KEPT[name]() + 1))


def kept(path: Path) -> Iterator[str]:
    """Yield functions of a file that cache arrays, and its global arrays."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.returns and "mx.array" in ast.unparse(node.returns):
            names = {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}
            yield from [node.name] if names & {"cache", "lru_cache"} else []
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func).startswith("mx."):
            yield ast.unparse(node)


@pytest.mark.long
def test_no_others_are_kept() -> None:
    files = [p for folder in ("mlxinfer", "kernels_metal", "kernels_cpu", "convert") for p in (ROOT / folder).rglob("*.py")]
    assert len(files) > 150
    found = {f"{path.relative_to(ROOT)}:{name}" for path in files for name in kept(path)}
    assert found == set(KEPT)
