"""How collectives enter JAX's programs: by XLA's FFI where that was tested, else by JAX's callbacks."""

from __future__ import annotations

import functools
import os

import jax
import jaxlib

from pyhvd.frameworks.door import NativeDoor, callbacks_are_asked_for, native_door
from pyhvd.native.shared_memory import hide_sites

TARGET = "pyhvd_collective"
KEEPER = "pyhvd_keep"
_EXTENSION = "_jax_ops"
# Versions of jaxlib, as (major, minor), with which the extension was tested. XLA refuses a handler late, and
# then JAX has no CPU.
_OLDEST, _NEWEST = (0, 5), (0, 10)

# An error shows the program's line, not JAX's.
hide_sites(os.path.join(os.path.dirname(jax.__file__), ""))


@functools.cache
def _register() -> NativeDoor | None:
    """Register the handler with XLA; return the door, or None if it cannot be used."""
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    if not _OLDEST <= version <= _NEWEST:
        return None
    door = native_door(_EXTENSION)
    if door is not None:
        jax.devices()  # XLA registers its backends first
        jax.ffi.register_ffi_target(TARGET, door.ops.handler(), platform="cpu")
        jax.ffi.register_ffi_target(KEEPER, door.ops.keeper(), platform="cpu")
    return door


def graph_ops() -> str:
    """Return how compiled functions run collectives: ``"native"`` or ``"callback"``.

    It is ``"native"`` if the arrays are in host memory, pyhvd's extension was built, and this version of
    jaxlib was tested. Callbacks are slower, and run in the order of the program.
    """
    if callbacks_are_asked_for() or jax.default_backend() != "cpu" or _register() is None:
        return "callback"
    return "native"


def open_door() -> NativeDoor:
    """Return the door.

    Raises
    ------
    RuntimeError
        The extension was not built, or jaxlib's version was not tested.
    """
    door = _register()
    if door is None:
        raise RuntimeError(
            f"pyhvd's extension for JAX cannot be used with jaxlib {jaxlib.__version__}: trace the function"
            " anew"
        )
    return door
