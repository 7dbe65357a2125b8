"""Make a view of any array, in host memory or on a device.

Owns the choice of the library for an array, by the module of its type. So no library is imported before an
array of its own is submitted. :mod:`pyhvd.arrays` handles host arrays.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Protocol

from pyhvd.arrays import TensorView, view
from pyhvd.devices.base import DeviceView

View = TensorView | DeviceView

_DLPACK_CUDA = frozenset((2, 13))  # kDLCUDA, kDLCUDAManaged


class Adopter(Protocol):
    """Makes views of the arrays of one library, or of several."""

    def takes(self, tensor: Any) -> bool:
        """Return whether an object is an array of the library, on a device."""

    def adopt(self, tensor: Any, *, writing: bool) -> DeviceView:
        """Return the view of a contiguous array, or of a contiguous copy; see :func:`adopt`."""


class HostAdopter(Protocol):
    """Makes views of the arrays of one library in host memory."""

    def adopt(self, tensor: Any, *, writing: bool, any_layout: bool) -> TensorView:
        """Return the view of an array, or of a contiguous copy; see :func:`adopt`."""


# By the top-level module of an array's type. Arrays of other libraries are taken by a protocol.
_HOST_MODULES = {
    "torch": "pyhvd.devices.torch_host_arrays",
    **dict.fromkeys(("jax", "jaxlib", "keras", "tensorflow"), "pyhvd.devices.framework_host_arrays"),
}
_MODULES = {"cupy": "pyhvd.devices.cupy_arrays", "torch": "pyhvd.devices.torch_arrays"}
_ANY_OTHER = "pyhvd.devices.dlpack_arrays"
_HOST_ONLY = frozenset(("builtins", "numpy", "ml_dtypes"))
_libraries: dict[str, Adopter] = {}


def register(root: str, library: Adopter) -> None:
    """Register the library of all arrays whose types come from a top-level module."""
    _libraries[root] = library


def adopt(tensor: Any, *, writing: bool = False, any_layout: bool = False) -> View:
    """Return the view of an array of any library.

    With ``writing`` the array can be changed. With ``any_layout`` its dimensions may lie in memory in any
    order; else they are row-major.

    The array is one that :func:`pyhvd.arrays.view` accepts; or it is on a GPU, of CuPy, torch, JAX, or any
    library with ``__cuda_array_interface__`` or DLPack.

    Raises
    ------
    TypeError
        The object is no array, or has no plain memory, or ``writing`` is set and it cannot be changed.
    ValueError
        ``writing`` is set, and the array is read-only, or its elements share memory.
    UnsupportedDtypeError
        The dtype is not supported.
    ImportError
        The array is on a GPU, and CuPy is not installed.
    """
    library = _library_of(tensor)
    if library is not None:
        return library.adopt(tensor, writing=writing)
    on_host = _HOST_MODULES.get(_root_of(type(tensor).__module__))
    if on_host is None:
        return view(tensor, writing=writing)
    host_library: HostAdopter = importlib.import_module(on_host).library
    return host_library.adopt(tensor, writing=writing, any_layout=any_layout)


@functools.cache
def _root_of(module: str) -> str:
    """Return the top-level module's name; programs use few, so all are cached."""
    return module.partition(".")[0]


def _library_of(tensor: Any) -> Adopter | None:
    """Return the library of an array on a device; None for any other object."""
    root = _root_of(type(tensor).__module__)
    if root in _HOST_ONLY:
        return None
    library = _libraries.get(root)
    if library is None:
        # A torch tensor that requires gradients raises an error for its interface attribute.
        on_gpu = getattr(tensor, "is_cuda", False) if root == "torch" else is_on_cuda(tensor)
        if root != "cupy" and not on_gpu:
            return None
        library = _load(root, tensor)
    return library if library.takes(tensor) else None


def is_on_cuda(tensor: Any) -> bool:
    """Return whether an object's protocols place it on a GPU."""
    if hasattr(tensor, "__array_interface__"):
        return False
    if hasattr(tensor, "__cuda_array_interface__"):
        return True
    device = getattr(tensor, "__dlpack_device__", None)
    try:
        return device is not None and int(device()[0]) in _DLPACK_CUDA
    except TypeError:  # a tracer of JAX has no device
        return False


def _load(root: str, tensor: Any) -> Adopter:
    try:
        module = importlib.import_module(_MODULES.get(root, _ANY_OTHER))
    except ImportError as exc:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise ImportError(
            f"{kind} is on a GPU, and pyhvd uses GPUs through CuPy, which cannot be imported ({exc}):"
            ' install it with pip install "pyhvd[cuda13]", or "pyhvd[cuda12]" where the driver is older'
        ) from exc
    library: Adopter = module.library
    register(root, library)
    return library
