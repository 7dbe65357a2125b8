"""Arrays of JAX, TensorFlow and Keras are taken without a copy, and come back as their own kind."""
# ruff: noqa: E402

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"
for _name in ("jax", "keras", "tensorflow"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: `make test-frameworks` installs it")

import jax
import jax.numpy as jnp
import keras
import tensorflow as tf

import pyhvd as hvd
from pyhvd.devices.array_libraries import adopt
from pyhvd.testing import run_ranks
from tests.mpi.test_docs_code import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = [
    block.code for block in BLOCKS if block.path.name == "frameworks.md" and block.tags[:1] == ("python",)
]
KERAS = next(block.code for block in BLOCKS if block.path.name == "keras.md")
MAKERS: dict[str, Any] = {"jax": jnp.asarray, "tensorflow": tf.constant}
KINDS: dict[str, Any] = {"jax": jax.Array, "tensorflow": tf.Tensor}
frameworks = pytest.mark.parametrize("framework", ["jax", "tensorflow"])


@frameworks
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8", "bool", "complex64"])
def test_every_dtype_comes_back_as_its_own_kind(framework: str, dtype: str) -> None:
    def body() -> None:
        make, kind = MAKERS[framework], KINDS[framework]
        named = jnp.dtype(dtype)
        op = hvd.Max if dtype == "bool" else hvd.Sum
        for shape in [(), (3,), (0, 2), (2, 3)]:
            given = make(np.full(shape, 1 + hvd.rank()).astype(named))
            for _ in range(3):
                result = hvd.allreduce(given, op=op, name="x")
                assert isinstance(result, kind)
                assert np.asarray(result).dtype == named
                assert (np.asarray(result) == np.full(shape, 3).astype(named)).all()
                assert np.asarray(result).shape == shape

    run_ranks(2, body)


@frameworks
def test_other_verbs(framework: str) -> None:
    def body() -> None:
        make, kind = MAKERS[framework], KINDS[framework]
        mine = make(np.full((2, 2), float(hvd.rank()), np.float32))
        moved, received = hvd.alltoall(mine, [1, 1]), None
        if isinstance(moved, tuple):
            moved, received = moved
        results = [
            hvd.allgather(mine),
            hvd.broadcast(mine, 1),
            hvd.reducescatter(mine, op=hvd.Sum),
            moved,
            *hvd.grouped_allreduce([mine, mine], op=hvd.Sum),
        ]
        assert all(isinstance(each, kind) for each in results)
        wanted = [[0, 0, 1, 1], [1, 1], [1], [0, 1], [1, 1], [1, 1]]
        assert [np.asarray(each)[:, 0].tolist() for each in results] == wanted
        assert received is None or received.tolist() == [1, 1]

    run_ranks(2, body)


def test_arrays_are_not_copied() -> None:
    for array in (jnp.arange(1000.0), tf.range(1000.0)):
        seen: Any = adopt(array)
        assert seen.array.ctypes.data == np.from_dlpack(array).ctypes.data
        result = seen.empty_like((500,))
        assert result.ptr % 64 == 0
        result.array[:] = 7
        given = result.result
        assert type(given) is type(array)
        assert np.from_dlpack(given).ctypes.data == result.ptr


def test_variables_give_tensors() -> None:
    def body() -> None:
        for variable in (tf.Variable([1.0, 2.0]), keras.Variable(np.array([1.0, 2.0]))):
            result = hvd.broadcast(variable, 0)
            assert isinstance(result, tf.Tensor)
            variable.assign(result * 2)
            assert np.asarray(variable).tolist() == [2.0, 4.0]

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hvd.allreduce_(jnp.ones(2)), "cannot change this ArrayImpl: use the form without"),
        (lambda: hvd.allreduce_(tf.Variable([1.0])), "cannot change this ResourceVariable: use the form"),
        (lambda: jax.jit(hvd.allreduce)(jnp.ones(2)), "such as jit, arrays have no memory: use"),
        (lambda: tf.function(hvd.allreduce)(tf.ones(2)), r"the verbs of pyhvd\.tensorflow"),
        (lambda: hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))), "convert_to_tensor"),
    ],
)
def test_refusals_have_a_remedy(call: Any, text: str) -> None:
    def body() -> None:
        with pytest.raises(TypeError, match=text):
            call()

    run_ranks(1, body)


IN_JIT = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import pyhvd as hvd

hvd.init()
reduce = lambda array: np.asarray(hvd.allreduce(array, op=hvd.Sum, name="x"))
double = jax.jit(lambda array: io_callback(reduce, array, array, ordered=True) * 2)
assert double(jnp.ones(3)).tolist() == [4.0] * 3
"""


@pytest.mark.timeout(360)
@pytest.mark.parametrize("code", [*PAGE, KERAS, IN_JIT], ids=["jax", "tensorflow", "keras", "in jit"])
def test_programs_of_the_page(code: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    command = [sys.executable, "-m", "pyhvd.run", "-n", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
def test_the_example_inside_spark() -> None:
    command = [sys.executable, str(ROOT / "examples" / "spark_keras.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained on 2 ranks: loss " in done.stdout
