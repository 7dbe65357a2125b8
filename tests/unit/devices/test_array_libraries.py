"""The library of an array, and the error for an object without one."""

from __future__ import annotations

import abc
import gc
import importlib.util
import sys
import types
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.arrays import TensorView
from pyhvd.devices import array_libraries
from pyhvd.devices.array_libraries import adopt, library_name
from pyhvd.devices.base import DeviceView
from pyhvd.testing import run_ranks
from tests.devices.fake import FakeDevice, FakeLibrary, fake_array

without_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_libraries, "_libraries", {"tests": FakeLibrary()})


class Interface:
    """An array on a GPU, by the CUDA array interface."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012


class Capsule:
    """An array by DLPack, of an unknown library."""

    def __init__(self, device: int) -> None:
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        return np.arange(3).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


def test_jax_on_the_host_needs_no_cupy() -> None:
    members = {"__module__": "jaxlib._jax", "__array__": lambda *_, **__: np.arange(3)}
    array = type("ArrayImpl", (Capsule,), members)(1)
    assert isinstance(adopt(array), TensorView)


def derive(base: type, module: str) -> Any:
    """Return a class of a program that derives from another; so many modules have names of libraries."""
    return type("Derived", (base,), {"__module__": module})


@pytest.mark.parametrize("module", ["__main__", "torch.mine", "cupy", "jaxlib.x", "numpy"])
def test_the_library_is_that_of_the_base_class(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, classes in array_libraries._CLASSES.items():
        for each in classes:
            base = np.ndarray if name == "numpy" else type(each, (), {})
            library: Any = types.ModuleType(name)
            setattr(library, each, base)
            with monkeypatch.context() as patch:
                if name != "numpy":
                    patch.setitem(sys.modules, name, library)
                made = derive(base, module)
                tensor = np.arange(3).view(made) if name == "numpy" else made()
                assert library_name(tensor) == name


def test_a_class_that_is_registered_as_an_array_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    jax: Any = types.ModuleType("jax")
    jax.Array = abc.ABCMeta("Array", (), {})
    monkeypatch.setitem(sys.modules, "jax", jax)
    members = {"__module__": "mine", "__array__": lambda *_, **__: np.arange(3)}
    kind = type("ArrayImpl", (Capsule,), members)
    jax.Array.register(kind)
    jax.core = types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    assert library_name(kind(1)) == "jax"
    with pytest.raises(TypeError, match="cannot change this ArrayImpl"):
        adopt(kind(1), writing=True)


def test_a_proxy_has_its_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """isinstance() of a proxy depends on the object for which it stands, and other proxies have others."""

    class Proxy:
        __class__: Any

        def __init__(self, inner: Any) -> None:
            object.__setattr__(self, "inner", inner)

        def __getattribute__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "inner"), name)

    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for inner in (cupy.ndarray(), np.arange(3)):
        proxy: Any = Proxy(inner)
        assert isinstance(proxy, type(inner))
        assert library_name(proxy) == "tests"
    view: Any = adopt(proxy)
    assert view.array.tolist() == [0, 1, 2]


def test_classes_are_not_kept() -> None:
    kind = derive(np.ndarray, "mine")
    assert library_name(np.arange(3).view(kind)) == "numpy"
    known = weakref.ref(kind)
    del kind
    gc.collect()
    assert known() is None


@without_cupy
@pytest.mark.parametrize(
    "tensor", [Interface(), Capsule(2), Capsule(13)], ids=["interface", "cuda", "managed"]
)
def test_without_cupy_the_extra_is_named(tensor: Any) -> None:
    for take in (adopt, partial(adopt, writing=True)):
        with pytest.raises(ImportError) as caught:
            take(tensor)
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        assert str(caught.value) == (
            f"{kind} is on a GPU, and pyhvd uses GPUs through CuPy, which cannot be imported"
            " (No module named 'cupy'):"
            ' install it with pip install "pyhvd[cuda13]", or "pyhvd[cuda12]" where the driver is older'
        )


def test_what_is_in_host_memory_stays_there() -> None:
    for tensor in (np.arange(3), 2.5, np.float32(1), np.arange(3).view(np.recarray), Capsule(1)):
        assert isinstance(adopt(tensor), TensorView)
    both = type("Both", (Interface,), {"__array_interface__": np.arange(3).__array_interface__})()
    assert isinstance(adopt(both), TensorView), "memory that both can reach is taken as host memory"


def test_what_is_no_array_is_none_for_a_gpu_either() -> None:
    for thing in (object(), None, "text"):
        with pytest.raises(TypeError, match="expected a numpy array"):
            adopt(thing)


@pytest.mark.usefixtures("_library")
def test_a_view_of_an_array_on_a_device() -> None:
    device = FakeDevice(3)
    array = fake_array(device, np.ones((4, 5), np.float32))
    view = adopt(array)
    assert isinstance(view, DeviceView)
    assert (view.ptr, view.shape, view.count, view.nbytes) == (array.ptr, (4, 5), 20, 80)
    assert (view.device, view.info.name, view.home, view.owner) == ("cuda:3", "float32", None, array)
    rows = view.first_rows(2)
    assert (rows.ptr, rows.shape, rows.nbytes, rows.owner) == (array.ptr, (2, 5), 40, array)
    target = view.empty_like((7,))
    assert isinstance(target, DeviceView)
    assert (target.shape, target.info, target.on) == ((7,), view.info, device)
    assert view.span.part(8, 12) == (array.ptr + 8, 12)


def test_compression_of_what_is_in_host_memory() -> None:
    """Compression sends float16, and returns a numpy array of the original dtype."""
    values = np.arange(3, dtype=np.float32)

    def body() -> None:
        result = hvd.allreduce(values, op=hvd.Sum, name="x", compression=hvd.Compression.fp16)
        assert (result.dtype, result.tolist()) == (np.float32, [0.0, 1.0, 2.0])

    run_ranks(1, body)
    assert hvd.Compression.fp16.compress(Capsule(1))[1] is None, "integers stay as they are"
    assert hvd.Compression.fp16.compress([1.0])[1] is None, "the call itself refuses a list"
