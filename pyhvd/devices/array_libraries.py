"""Whose array is it? Any array in -> a view of it, in host memory or on a device.

Owns: which library looks after an object, by the module of its type, so that none is imported before an array
of its own has come in. Host arrays are the business of :mod:`pyhvd.arrays`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Protocol

import numpy as np

from pyhvd.arrays import TensorView, view, view_for_writing
from pyhvd.devices.base import ArrayLibrary, DeviceView

View = TensorView | DeviceView

_DLPACK_CUDA = frozenset((2, 13))  # kDLCUDA, kDLCUDAManaged


class Adopter(ArrayLibrary, Protocol):
    """A library that can look at its own arrays."""

    def takes(self, tensor: Any) -> bool:
        """Return whether an object is an array on a device."""

    def adopt(self, tensor: Any, *, writing: bool) -> DeviceView:
        """Return a contiguous array's view, without a copy; of any other one a copy's.

        Raises
        ------
        UnsupportedDtypeError
            The dtype cannot travel.
        TypeError
            It is to be written, and cannot be.
        """


# By the first part of the name of the module that defines an array's type.
_MODULES = {
    "cupy": "pyhvd.devices.cupy_arrays",
    "torch": "pyhvd.devices.torch_arrays",
    "jaxlib": "pyhvd.devices.dlpack_arrays",
    "jax": "pyhvd.devices.dlpack_arrays",
}
_ANYBODY = "pyhvd.devices.dlpack_arrays"
_NOBODY = frozenset(("builtins", "numpy", "ml_dtypes"))
_libraries: dict[str, Adopter] = {}


def register(root: str, library: Adopter) -> None:
    """Let a library look after the arrays whose types are defined under a module."""
    _libraries[root] = library


def adopt(tensor: Any) -> View:
    """Normalise an input array, of whatever library.

    Parameters
    ----------
    tensor : array
        What :func:`pyhvd.arrays.view` takes; or an array on a GPU, of CuPy, torch, JAX, or any library that
        speaks ``__cuda_array_interface__`` or DLPack.

    Raises
    ------
    TypeError
        Not an array.
    UnsupportedDtypeError
        The dtype cannot travel.
    ImportError
        It is on a GPU, and CuPy is not installed.
    """
    library = _library_of(tensor)
    return view(tensor) if library is None else library.adopt(tensor, writing=False)


def adopt_for_writing(tensor: Any) -> View:
    """Normalise the target of an in-place operation; see :func:`adopt`.

    Raises
    ------
    ValueError
        The array is read-only.
    TypeError
        It is no array, or one that cannot be changed.
    """
    library = _library_of(tensor)
    return view_for_writing(tensor) if library is None else library.adopt(tensor, writing=True)


@functools.cache
def _root_of(module: str) -> str:
    """Return the first part of a module's name; programs have arrays of few modules."""
    return module.partition(".")[0]


def _library_of(tensor: Any) -> Adopter | None:
    """Return who looks after an array on a device; None for everything else."""
    if type(tensor) is np.ndarray:
        return None
    root = _root_of(type(tensor).__module__)
    if root in _NOBODY:
        return None
    library = _libraries.get(root)
    if library is None:
        # torch's tensors that need gradients raise where they are asked for the interface.
        on_gpu = getattr(tensor, "is_cuda", False) if root == "torch" else _is_on_cuda(tensor)
        if root != "cupy" and not on_gpu:
            return None
        library = _load(root, tensor)
    return library if library.takes(tensor) else None


def _is_on_cuda(tensor: Any) -> bool:
    """Return whether an object says that it is on a GPU."""
    if hasattr(tensor, "__array_interface__"):
        return False
    if hasattr(tensor, "__cuda_array_interface__"):
        return True
    device = getattr(tensor, "__dlpack_device__", None)
    return device is not None and int(device()[0]) in _DLPACK_CUDA


def _load(root: str, tensor: Any) -> Adopter:
    try:
        module = importlib.import_module(_MODULES.get(root, _ANYBODY))
    except ImportError as exc:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise ImportError(
            f"{kind} lives on a GPU, and pyhvd reaches GPUs by CuPy, which cannot be imported ({exc}):"
            ' install it with pip install "pyhvd[cuda13]", or "pyhvd[cuda12]" where the driver is older'
        ) from exc
    library: Adopter = module.library
    register(root, library)
    return library
