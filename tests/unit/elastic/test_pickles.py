"""A state by value: what comes back is equal, of the same kind, and shares no memory with the first."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyhvd.elastic import pickles

ARRAYS = {
    "plain": np.arange(12.0).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "axes": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    "gaps": np.arange(24).reshape(4, 6)[::2, ::3],
    "reversed": np.arange(6)[::-1],
    "0-d": np.array(3.5),
    "empty": np.empty((0, 3), np.float32),
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "dates": np.array(["2024-01-01"], "datetime64[D]"),
    "text": np.array(["a", "bcd"]),
    "no bytes": np.array(["", ""]),
    "swapped": np.arange(3, dtype=">i4"),
    "records": np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    "objects": np.array([1, "two", None], object),
    "masked": np.ma.masked_array([1, 2, 3], [False, True, False]),
    "read-only": np.frombuffer(b"abcd", np.uint8),
}


@dataclasses.dataclass
class Progress:
    """A class of a module."""

    epoch: int
    losses: list[float]


def back(state: Any) -> Any:
    return pickles.load(*pickles.dump(state))


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    array = ARRAYS[name]
    found = back({"of": [array]})["of"][0]
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    assert not np.shares_memory(found, array)


def test_the_order_of_axes_stays() -> None:
    for name in ("plain", "fortran", "axes"):
        assert back(ARRAYS[name]).strides == ARRAYS[name].strides


def test_contiguous_arrays_are_not_copied_by_dump() -> None:
    for name in ("plain", "fortran", "axes"):
        (found,), _ = pickles.dump(ARRAYS[name])
        assert np.shares_memory(found, ARRAYS[name])
        assert (found.dtype, found.shape) == (np.uint8, (ARRAYS[name].nbytes,))


def test_arrays_that_are_one_stay_one() -> None:
    one, gaps = np.arange(5), np.arange(10)[::2]
    state = back([one, one[:], one, gaps, gaps, one.copy(), one.view(np.uint64)])
    state[0][1] = 99
    assert [each[1] for each in state] == [99, 99, 99, 2, 2, 1, 99]
    assert state[0] is state[2]
    assert state[3] is state[4]


def test_other_objects() -> None:
    nested = {
        "a": [1, {"b": (2, b"x")}],
        "progress": Progress(3, [0.5]),
        "counts": collections.Counter("aab"),
    }
    nested["self"] = nested
    found = back(nested)
    assert found["progress"] == nested["progress"]
    assert found["counts"] == nested["counts"]
    assert found["self"] is found
    assert back(Progress) is Progress
    assert back(lambda x: x + len(nested))(1) == 5
    generator = np.random.default_rng(5)
    assert back(generator).random() == generator.random()


def test_arrays_made_while_pickling_are_not_mistaken_for_each_other() -> None:
    class Many:
        def __getstate__(self) -> Any:
            return [np.full(1000, k) for k in range(50)]

        def __setstate__(self, state: Any) -> None:
            self.found = [int(each[0]) for each in state]

    assert back(Many()).found == list(range(50))


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match=r"TypeError: cannot pickle '_thread.lock' object"):
        pickles.dump({"a": threading.Lock()})


PROGRAM = """
    import enum, sys
    from pathlib import Path
    from pyhvd.elastic import pickles

    class Phase(enum.Enum):
        WARM = 1

    class Outer:
        class Inner:
            pass

    def scale(x):
        return 2 * x

    path = Path(sys.argv[1])
    if not path.exists():
        _, rest = pickles.dump([Phase.WARM, Outer.Inner(), scale, lambda x: scale(x) + 1])
        path.write_bytes(rest)
    else:
        phase, inner, function, nameless = pickles.load([], path.read_bytes())
        assert phase is Phase.WARM
        assert type(inner) is Outer.Inner
        assert function is scale
        assert nameless(1) == 3
"""


def test_classes_of_the_program_are_those_of_the_next_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    for _ in range(2):
        command = [sys.executable, str(program), str(tmp_path / "state")]
        subprocess.run(command, check=True, timeout=60)
