"""Our `dataclass` is the standard one in all but the moment at which methods are made."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from dataclasses import KW_ONLY, FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from typing import Any

import pytest

from mlxinfer.util.dataclass import _OFTEN, dataclass


def _classes(decorator: Any) -> list[Any]:
    """The same classes by both decorators."""

    @decorator(frozen=True, slots=True)
    class Point:
        """A frozen one."""

        x: int
        y: list[int] = field(default_factory=list, compare=False)
        z: str = field(default="z", repr=False)
        sum: int = field(init=False, default=7)

    @decorator(slots=True)
    class Mutable:
        a: int
        _: KW_ONLY
        b: int = 2
        made: list[int] = field(init=False)

        def __post_init__(self) -> None:
            self.made = [self.a, self.b]

    @decorator(frozen=True, slots=True, kw_only=True)
    class Named:
        first: int = 1
        second: int

        @property
        def both(self) -> int:
            return self.first + self.second

    @decorator(slots=True, eq=False)
    class Alone:
        inner: Any = None

        def __repr__(self) -> str:
            return "alone"

    @decorator
    class Open:
        n: int = 0

    return [Point, Mutable, Named, Alone, Open]


OURS, THEIRS = _classes(dataclass), _classes(dataclasses.dataclass)
CALLS: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = [
    (0, (1,), {}),
    (0, (1, [2], "q"), {}),
    (0, (), {}),
    (0, (1,), {"sum": 3}),
    (1, (1,), {"b": 3}),
    (1, (1, 2), {}),
    (2, (), {"second": 2}),
    (2, (1, 2), {}),
    (2, (), {}),
    (3, (), {"inner": 3}),
    (4, (5,), {}),
    (4, (5, 6), {}),
]


@pytest.mark.parametrize(("kind", "args", "named"), CALLS)
def test_they_are_made_and_shown_alike(kind: int, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    def outcome(cls: Any) -> object:
        try:
            made, again = cls(*args, **named), cls(*args, **named)
        except TypeError:
            return TypeError
        shown = repr(made).replace("_classes.<locals>.", "")
        return shown, made == again, made != replace(made), [getattr(made, one.name) for one in fields(made)], is_dataclass(cls)

    assert outcome(OURS[kind]) == outcome(THEIRS[kind])


def test_many_are_made_as_the_first_ones() -> None:
    point, mutable, named, *_ = _classes(dataclass)
    for cls, args, names in ((point, (1, [2], "q"), {}), (mutable, (1,), {}), (named, (), {"second": 5})):
        made = [cls(*args, **names) for _ in range(_OFTEN)]
        assert "write" in vars(cls.__init__)
        made += [cls(*args, **names) for _ in range(10)]
        assert all(one == made[0] and repr(one) == repr(made[0]) for one in made)
        assert "write" not in vars(cls.__init__)
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            cls(*args, **names, other=1)


def test_what_is_frozen_stays_and_can_be_a_key() -> None:
    for point, named in ((OURS[0](1), OURS[2](second=2)), (THEIRS[0](1), THEIRS[2](second=2))):
        for name in ("x", "y", "unknown"):
            with pytest.raises((FrozenInstanceError, TypeError)):
                setattr(point, name, 3)
        with pytest.raises((FrozenInstanceError, TypeError)):
            del point.x
        assert len({point, type(point)(1, [9]), type(point)(2)}) == 2
        assert named.both == 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(OURS[1](1))
    with pytest.raises(TypeError, match="unhashable"):
        hash(OURS[4]())
    alone = OURS[3]()
    assert alone != OURS[3]()
    assert hash(alone) == hash(alone)
    assert repr(alone) == "alone"


@dataclass(frozen=True, slots=True)
class Kept:
    """A class at module level, for pickle."""

    n: int
    rest: tuple[int, ...] = ()


@dataclass(slots=True)
class Changing:
    """The same, not frozen."""

    n: int


def test_copies_and_pickles_and_children() -> None:
    for one in (Kept(1, (2,)), Changing(3)):
        for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one)), replace(one)):
            assert other == one
            assert other is not one
    assert asdict(Kept(1)) == {"n": 1, "rest": ()}
    assert Kept.__match_args__ == ("n", "rest")

    @dataclass(frozen=True, slots=True)
    class Child(Kept):
        more: int = 0

    assert Child(1, (2,), 3) == Child(1, (2,), 3) != Child(1, (2,), 4)
    assert Child(1) != Kept(1)
    assert repr(Child(1, more=5)).endswith("Child(n=1, rest=(), more=5)")
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    looped: Any = OURS[1](1)
    looped.a = looped
    assert "..." in repr(looped)


def test_what_every_process_imports_is_made_so() -> None:
    """All of it together took as long as importing NumPy."""
    script = """
import sys
from dataclasses import is_dataclass
from mlxinfer import LLM
found = {c for name, m in list(sys.modules.items()) if name.startswith("mlxinfer") for c in vars(m).values() if isinstance(c, type)}
print(*{f"{c.__module__}.{c.__name__}" for c in found if is_dataclass(c) and c.__dataclass_params__.init})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_a_hash_of_its_own_stays():
    @dataclass(slots=True)
    class Named:
        name: str
        size: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Named) and self.name == other.name

        def __hash__(self) -> int:
            return hash(self.name)

    assert hash(Named("a", 1)) == hash(Named("a", 2))
    assert Named("a", 1) == Named("a", 2)
