"""Whether an MPI says that it takes addresses on devices: libraries made up, and the one that is there."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest

from pyhvd.transport.mpi import probe

PRESENT = "an MPI"


def says(monkeypatch: pytest.MonkeyPatch, library: str, environ: dict[str, str], **names: Any) -> bool | None:
    """Ask a library that has these names and no others."""
    monkeypatch.setattr(ctypes, "CDLL", lambda path: types.SimpleNamespace(**names))
    return probe.cuda_aware("/site-packages/mpi4py/MPI.so", library, environ)


def gpu_query(supported: int, error: int = 0) -> Any:
    """Return a function as MPICH has it, which knows of CUDA (0)."""

    def query(kind: int, answer: Any) -> int:
        assert kind == 0
        answer._obj.value = supported
        return error

    return query


@pytest.mark.parametrize("supported", [0, 1])
def test_the_library_has_a_function_for_it(supported: int, monkeypatch: pytest.MonkeyPatch) -> None:
    aware = bool(supported)
    assert says(monkeypatch, PRESENT, {}, MPIX_Query_cuda_support=lambda: supported) is aware
    assert says(monkeypatch, PRESENT, {}, MPIX_GPU_query_support=gpu_query(supported)) is aware
    both: dict[str, Any] = {
        "MPIX_Query_cuda_support": lambda: supported,
        "MPIX_GPU_query_support": gpu_query(1 - supported),
    }
    assert says(monkeypatch, "Intel(R) MPI Library", {"I_MPI_OFFLOAD": "1"}, **both) is aware


def test_a_function_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(monkeypatch, PRESENT, {}, MPIX_GPU_query_support=gpu_query(1, error=13)) is None


@pytest.mark.parametrize(
    ("library", "environ", "aware"),
    [
        ("Intel(R) MPI Library 2021.15 for Linux* OS", {"I_MPI_OFFLOAD": "1"}, True),
        ("Intel(R) MPI Library 2021.15 for Linux* OS", {"I_MPI_OFFLOAD": "0"}, False),
        ("Intel(R) MPI Library 2021.15 for Linux* OS", {}, False),
        ("MVAPICH2 Version      :\t2.3.1", {"MV2_USE_CUDA": "1"}, True),
        ("MVAPICH2 Version      :\t2.3.1", {"I_MPI_OFFLOAD": "1"}, False),
        ("MPICH Version:\t3.4", {"I_MPI_OFFLOAD": "1", "MV2_USE_CUDA": "1"}, None),
    ],
)
def test_a_library_without_one_may_have_a_variable(
    library: str, environ: dict[str, str], aware: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert says(monkeypatch, library, environ) is aware
