"""Take and return arrays of JAX, TensorFlow and Keras in host memory.

numpy views the memory of an array; results are numpy's, and come back through DLPack. Neither is a copy, but
for results in bfloat16, which numpy cannot export. Arrays of JAX and tensors of TensorFlow never change, so
there is no in-place operation. The result for a variable is a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyhvd.arrays import Array, TensorView, new_array, view
from pyhvd.devices import array_libraries
from pyhvd.dtypes import Code

# XLA and TensorFlow take memory without a copy from such an address on.
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Results:
    """Makes results of one framework; see :class:`pyhvd.arrays.HostLibrary`."""

    convert: Callable[[Array, Code], Any]

    def empty_like(self, view: TensorView, shape: tuple[int, ...]) -> TensorView:
        dtype = view.array.dtype
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = new_array((nbytes + _ALIGNMENT,), np.dtype(np.uint8))
        first = -memory.ctypes.data % _ALIGNMENT
        array = memory[first : first + nbytes].view(dtype).reshape(shape)
        return TensorView(array, view.info, library=self)

    def give(self, view: TensorView) -> Any:
        return self.convert(view.array, view.info.code)


class FrameworkLibrary:
    """Takes arrays of these frameworks; see :class:`pyhvd.devices.array_libraries.HostAdopter`."""

    def adopt(self, tensor: Any, *, writing: bool, any_layout: bool) -> TensorView:
        root = array_libraries.library_name(tensor)
        if root == "keras" and hasattr(tensor, "value"):  # a variable: that of its backend
            found = array_libraries.adopt(tensor.value, writing=writing, any_layout=any_layout)
            if not isinstance(found, TensorView):
                raise TypeError("this variable of Keras is on a GPU: pass variable.value")
            return found
        if why := _why_not(tensor, root, writing=writing):
            raise TypeError(why)
        results = _Results(_to_tensorflow if root == "tensorflow" else _to_jax)
        return replace(view(np.asarray(tensor)), home=None, library=results)


def _why_not(tensor: Any, root: str, *, writing: bool) -> str:
    """Return why an array cannot be taken, and the remedy; empty if it can."""
    kind = type(tensor).__name__
    if root == "tensorflow" and kind == "IndexedSlices":
        return "IndexedSlices have no dense memory: pass tf.convert_to_tensor(slices)"
    if root == "tensorflow" and sys.modules["tensorflow"].is_symbolic_tensor(tensor):
        return "in a tf.function tensors have no memory: call the verbs of pyhvd.tensorflow"
    if root == "jax" and isinstance(tensor, sys.modules["jax"].core.Tracer):
        remedy = "use the verbs of pyhvd.jax, which can be compiled"
        return f"in a transform of JAX, such as jit, arrays have no memory: {remedy}"
    if not hasattr(tensor, "__array__"):
        return f"expected an array, not {type(tensor).__module__}.{kind}"
    if writing:
        return (
            f"an in-place operation cannot change this {kind}: use the form without the trailing underscore,"
            " and assign its result to a variable"
        )
    return ""


def _to_jax(array: Array, code: Code) -> Any:
    jax = sys.modules["jax"]
    if code == Code.BFLOAT16:
        return jax.numpy.asarray(array)
    return jax.dlpack.from_dlpack(array)


def _to_tensorflow(array: Array, code: Code) -> Any:
    tensorflow = sys.modules["tensorflow"]
    if code == Code.BFLOAT16:
        return tensorflow.constant(array)
    return tensorflow.experimental.dlpack.from_dlpack(array.__dlpack__())


library = FrameworkLibrary()
