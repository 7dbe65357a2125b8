"""Make a view of any array, in host memory or on a device.

Owns the choice of the library for an array: that of whose array class it is an instance. No library is
imported for that, as the program has imported that of its arrays. :mod:`pyhvd.arrays` handles host arrays.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pyhvd.arrays import SCALARS, TensorView, view
from pyhvd.devices.base import DeviceView
from pyhvd.devices.streams import refuse_capture

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


# The array classes of each library, by which the arrays of derived classes are found too.
_CLASSES = {
    "numpy": ("ndarray",),
    "torch": ("Tensor",),
    "cupy": ("ndarray",),
    "jax": ("Array",),
    "tensorflow": ("Tensor", "Variable", "IndexedSlices"),
    "keras": ("Variable",),
}
# Arrays of other libraries are taken by a protocol.
_HOST_MODULES = {
    "torch": "pyhvd.devices.torch_host_arrays",
    **dict.fromkeys(("jax", "jaxlib", "keras", "tensorflow"), "pyhvd.devices.framework_host_arrays"),
}
_MODULES = {"cupy": "pyhvd.devices.cupy_arrays", "torch": "pyhvd.devices.torch_arrays"}
_ANY_OTHER = "pyhvd.devices.dlpack_arrays"
_HOST_ONLY = frozenset(("builtins", "numpy", "ml_dtypes"))
_libraries: dict[str, Adopter] = {}
_names: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def register(name: str, library: Adopter) -> None:
    """Register the library of all arrays for which :func:`library_name` gives a name."""
    _libraries[name] = library


def library_name(tensor: Any) -> str:
    """Return the top-level module of the library of whose arrays an object is one.

    For objects that are no arrays of a known library, it is the module of their own class.
    """
    name = _names.get(type(tensor))
    if name is None:
        name = _names[type(tensor)] = _find_name(tensor)
    return name


def _find_name(tensor: Any) -> str:
    kind = type(tensor)
    if isinstance(tensor, SCALARS):
        return "numpy"
    if tensor.__class__ is kind:  # a proxy's library would depend on the object for which it stands
        for name, classes in _CLASSES.items():
            known = [getattr(sys.modules.get(name), each, None) for each in classes]
            if isinstance(tensor, tuple(each for each in known if isinstance(each, type))):
                return name
    return kind.__module__.partition(".")[0]


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
    RuntimeError
        The array is on a GPU, and its stream captures a graph.
    ImportError
        The array is on a GPU, and CuPy is not installed.
    """
    name = library_name(tensor)
    if name == "torch" and type(tensor) is not (torch := sys.modules["torch"]).Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # its class may change what functions do
            return _adopt(name, tensor, writing=writing, any_layout=any_layout)
    return _adopt(name, tensor, writing=writing, any_layout=any_layout)


def _adopt(name: str, tensor: Any, *, writing: bool, any_layout: bool) -> View:
    library = _library_of(name, tensor)
    if library is not None:
        found = library.adopt(tensor, writing=writing)
        if not found.ptr and found.nbytes:  # address 0 would be taken for a tensor of a rank that has joined
            raise TypeError(f"this array of {found.nbytes} bytes has no memory: its address is 0")
        refuse_capture(found.on, found.stream)
        return found
    on_host = _HOST_MODULES.get(name)
    if on_host is None:
        return view(tensor, writing=writing)
    host_library: HostAdopter = importlib.import_module(on_host).library
    return host_library.adopt(tensor, writing=writing, any_layout=any_layout)


def _library_of(name: str, tensor: Any) -> Adopter | None:
    """Return the library of an array on a device; None for any other object."""
    if name in _HOST_ONLY:
        return None
    library = _libraries.get(name)
    if library is None:
        # A torch tensor that requires gradients raises an error for its interface attribute.
        on_gpu = getattr(tensor, "is_cuda", False) if name == "torch" else is_on_cuda(tensor)
        if name != "cupy" and not on_gpu:
            return None
        library = _load(name, tensor)
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


def _load(name: str, tensor: Any) -> Adopter:
    try:
        module = importlib.import_module(_MODULES.get(name, _ANY_OTHER))
    except ImportError as exc:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise ImportError(
            f"{kind} is on a GPU, and pyhvd uses GPUs through CuPy, which cannot be imported ({exc}):"
            ' install it with pip install "pyhvd[cuda13]", or "pyhvd[cuda12]" where the driver is older'
        ) from exc
    library: Adopter = module.library
    register(name, library)
    return library
