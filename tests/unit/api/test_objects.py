"""The pickles of objects are cloudpickle's, also those that cloudpickle does not make."""

from __future__ import annotations

import collections
import enum
import math
import pickle
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest

from pyhvd.api import objects


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


class Plain:
    """An object that counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        type(self).pickled += 1
        return Plain, ()


class Items(list[int]):
    pass


class Table(dict[str, int]):
    pass


def _looped() -> list[Any]:
    loop: list[Any] = [1]
    loop.append({"itself": loop})
    return loop


_SHARED = ["shared"]
PLAIN: list[Any] = [
    *(None, True, 0, -1, 2**70, 1.5, math.inf, "", "text\ud800", b"", b"bytes", bytearray(b"bytes")),
    *([], (), {}, set(), frozenset(), [1, (2, {3: {4}, "5": frozenset((6,))})], {"a": 1}),
    *([_SHARED, _SHARED], _looped(), list(range(3000)), b"x" * 200_000, ["y" * 70_000] * 3),
]


@pytest.mark.parametrize("thing", PLAIN, ids=lambda thing: repr(thing)[:20])
def test_builtins_are_pickled_without_cloudpickle(thing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = cloudpickle.dumps(thing)
    monkeypatch.setattr(cloudpickle, "dumps", None)
    assert objects._pickled(thing) == want


def _others() -> dict[str, Any]:
    class Local:
        pass

    def function(x: int) -> int:
        return x + len(_SHARED)

    return {
        "lambda": lambda x: x,
        "nested function": function,
        "module's function": pickle.dumps,
        "builtin": len,
        "method": [].append,
        "local class": Local,
        "its object": Local(),
        "class": Plain,
        "type": int,
        "type of None": type(None),
        "enum": Colour.RED,
        "int enum": Level.LOW,
        "named tuple": Point(1),
        "str": Text("text"),
        "list": Items((1, 2)),
        "dict": Table(a=1),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, a=[1]),
        "numpy": np.arange(3),
        "numpy's number": np.float32(1.5),
        "complex": 1j,
        "range": range(3),
        "dots": ...,
        "error": ValueError("text"),
        "module": math,
        "memory": memoryview(b"bytes"),
    }


@pytest.mark.parametrize("what", _others())
def test_other_objects_are_pickled_by_cloudpickle(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = _others()[what]
    given: list[Any] = []
    dumps = cloudpickle.dumps

    def note(obj: Any) -> Any:
        given.append(obj)
        return dumps(obj)

    monkeypatch.setattr(cloudpickle, "dumps", note)
    for each in (thing, [1, {"a": (thing, "after")}]):
        assert objects._pickled(each) == dumps(each)
        assert given.pop() is each


def test_a_buffer_is_pickled_as_cloudpickle_does() -> None:
    thing = pickle.PickleBuffer(bytearray(b"bytes"))
    assert objects._pickled(thing) == cloudpickle.dumps(thing)


def test_an_object_is_pickled_once() -> None:
    Plain.pickled = 0
    objects._pickled([1, 2, Plain()])
    assert Plain.pickled == 1


def test_too_deep_a_nesting_is_cloudpickles_error() -> None:
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(pickle.PicklingError, match="recursion") as caught:
        objects._pickled(deep)
    while deep:  # a nested release would be deep too
        deep = deep.pop()
    assert isinstance(caught.value.__cause__, RecursionError)


def test_an_error_does_not_follow_from_the_first_attempt() -> None:
    with pytest.raises(TypeError) as caught:
        objects._pickled([1, (each for each in [1])])
    assert caught.value.__context__ is None
