"""A plugin for pytest: tests that compare numbers exactly are marked `exact`, and judged at `BOUND` on a virtual GPU.

Apple's paravirtual device, which hosted runners have, rounds otherwise than the hardware: results differ by 1e-4 there that are equal on a
Mac. On it, comparisons of floats in tests with the mark pass within `BOUND`; all others, and all devices else, are judged as written.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

BOUND = 1e-3
"""Difference that passes on a virtual GPU. A test that asks for less is `exact`."""
_TESTS = str(Path(__file__).parents[1])
_BITWISE = frozenset({"array_equal", "assert_array_equal"})
_CLOSE = frozenset({"allclose", "approx", "assert_allclose"})
_TOLERANCES = frozenset({"abs", "atol", "rel", "rtol"})


@cache
def is_virtual() -> bool:
    """Return True on Apple's paravirtual device."""
    try:
        return mx.metal.is_available() and "Paravirtual" in str(mx.device_info(mx.gpu).get("device_name", ""))
    except RuntimeError:  # there is no device
        return False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose code compares numbers exactly."""
    for item in items:
        if isinstance(item, pytest.Function) and is_exact(item.function):
            item.add_marker("exact")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Judge a marked test at `BOUND` on a virtual GPU. Where a comparison of two numbers fails within it, the test ends, and is skipped."""
    if not is_virtual() or pyfuncitem.get_closest_marker("exact") is None:
        return (yield)
    with judged_at_bound():
        try:
            return (yield)
        except AssertionError as error:
            if not within_bound(str(error)):
                raise
            pytest.skip("differs by less than 1e-3, as a virtual GPU may")


@cache
def is_exact(function: Callable[..., Any]) -> bool:
    """Return True if a test, or a function of its module that it calls, compares arrays bitwise or within less than `BOUND`."""
    codes = list(_reached(function))
    names = {name for code in codes for name in code.co_names}
    if names & _BITWISE:
        return True
    constants = [constant for code in codes for constant in code.co_consts]
    values = [*constants, *(getattr(function, "__globals__", {}).get(name) for name in names)]
    if any(0 < number < BOUND for number in _numbers(values)):
        return True
    keywords = {name for constant in constants if isinstance(constant, tuple) for name in constant}
    return bool(names & _CLOSE) and not keywords & _TOLERANCES


def _reached(function: Callable[..., Any]) -> Iterator[CodeType]:
    """Yield the code of a function, of functions within it, and of those of its module that it names."""
    seen, todo = set(), [code for code in [getattr(function, "__code__", None)] if code is not None]
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        called = (function.__globals__.get(name) for name in code.co_names)
        todo += [f.__code__ for f in called if isinstance(f, FunctionType) and _is_near(f, function)]


def _is_near(called: FunctionType, function: Callable[..., Any]) -> bool:
    return called.__module__ == function.__module__ or called.__name__.startswith("assert_")


def _numbers(values: Iterable[object]) -> Iterator[float]:
    for value in values:
        if isinstance(value, dict):
            yield from _numbers(value.values())
        elif isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, float):
            yield value


@contextmanager
def judged_at_bound() -> Iterator[None]:
    """Within the context, comparisons of floats that tests make pass within `BOUND`. Those that the package makes stay exact."""
    with (
        patch.object(np.testing, "assert_allclose", _at_least(np.testing.assert_allclose)),
        patch.object(np, "allclose", _at_least(np.allclose)),
        patch.object(mx, "allclose", _at_least(mx.allclose)),
        patch.object(np.testing, "assert_array_equal", _same_or_close(np.testing.assert_array_equal, np.testing.assert_allclose)),
        patch.object(np, "array_equal", _same_or_close(np.array_equal, _close)),
        patch.object(pytest, "approx", _approximately(pytest.approx)),
        patch.object(mx, "array_equal", _same_or_close(mx.array_equal, lambda *arrays, **options: mx.array(_close(*arrays, **options)))),
    ):
        yield


def _at_least(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Return a comparison whose tolerances are not less than `BOUND`."""

    def judge(one: Any, other: Any, *tolerances: float, **options: Any) -> Any:
        if not _is_lenient(sys._getframe(1)):
            return compare(one, other, *tolerances, **options)
        given = dict(zip(("rtol", "atol"), tolerances, strict=False)) | options
        return compare(one, other, **given | {name: max(given.get(name, 0.0), BOUND) for name in ("rtol", "atol")})

    return judge


def _approximately(approx: Callable[..., Any]) -> Callable[..., Any]:
    """Return `pytest.approx` with a relative tolerance that is not less than `BOUND`."""
    return lambda expected, rel=None, abs=None, nan_ok=False: approx(expected, max(rel or 0.0, BOUND), abs, nan_ok)


def _same_or_close(compare: Callable[..., Any], close: Callable[..., Any]) -> Callable[..., Any]:
    """Return a comparison that is exact for what is not floats."""

    def judge(one: Any, other: Any, **options: Any) -> Any:
        if not (_is_lenient(sys._getframe(1)) and _floats(one) and _floats(other)):
            return compare(one, other, **options)
        return close(_wide(one), _wide(other), rtol=BOUND, atol=BOUND, **options)

    return judge


def _close(one: Any, other: Any, rtol: float, atol: float, equal_nan: bool = False) -> bool:
    return one.shape == other.shape and bool(np.isclose(one, other, rtol, atol, equal_nan).all())


def _is_lenient(caller: FrameType) -> bool:
    """Return True if a comparison is made by a test, and not to show that arrays differ."""
    if not str(caller.f_globals.get("__file__", "")).startswith(_TESTS):
        return False
    return _DIFFER.search(linecache.getline(caller.f_code.co_filename, caller.f_lineno)) is None


_DIFFER = re.compile(r"\bnot (?:np|mx)\.(?:array_equal|allclose)\(")


def _floats(array: Any) -> bool:
    if isinstance(array, mx.array):
        return mx.issubdtype(array.dtype, mx.floating)
    return isinstance(array, (np.ndarray, np.floating)) and np.issubdtype(array.dtype, np.floating)


def _wide(array: Any) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32) if isinstance(array, mx.array) else array, np.float64)


_COMPARED = re.compile(r"^assert (?P<left>[^<]+) <=? (?P<right>[^\n<]+)$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w.])")


def within_bound(message: str) -> bool:
    """Return True if pytest's message is about a number that is too large for its bound, and not for `BOUND`: "assert 3e-05 < 1e-05".

    Of a bound that is a product with a factor below `BOUND`, the other factors are kept.
    """
    found = _COMPARED.search(message)
    if found is None:
        return False
    left, right = ([float(number) for number in _NUMBER.findall(found[side])] for side in ("left", "right"))
    if len(left) != 1 or not right or min(right) >= BOUND or any(sign in found["right"] for sign in "+/"):
        return False
    bound = BOUND
    for factor in sorted(right)[1:]:
        bound *= factor
    return left[0] < bound
