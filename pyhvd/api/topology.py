"""Ranks and sizes, and Horovod's functions about the build.

In a child that a rank has forked, such as a worker of a data loader, ranks and sizes are the rank's.
"""

from __future__ import annotations

import importlib.util

from pyhvd.engine import context


def is_initialized() -> bool:
    """Return whether ``init()`` has been called, and ``shutdown()`` has not; also in a forked child."""
    return context.current_holder().context is not None


def rank() -> int:
    """Return this rank's number, 0 .. size-1."""
    return context.inherited().topology.rank


def size() -> int:
    """Return the number of ranks."""
    return context.inherited().topology.size


def local_rank() -> int:
    """Return this rank's number among the ranks of its node (those that can share memory)."""
    return context.inherited().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return context.inherited().topology.local_size


def cross_rank() -> int:
    """Return the number of this node among the nodes that have a rank of this local rank."""
    return context.inherited().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank of this local rank."""
    return context.inherited().topology.cross_size


def is_homogeneous() -> bool:
    """Return whether every node has the same number of ranks; False before ``init()``."""
    return is_initialized() and context.inherited().topology.homogeneous


def mpi_threads_supported() -> bool:
    """Return whether MPI granted MPI_THREAD_MULTIPLE, so that the program may use MPI from any thread."""
    return context.inherited().threads_supported


def mpi_enabled() -> bool:
    """Return whether MPI carries the negotiation: always."""
    return True


def mpi_built() -> bool:
    """Return whether MPI is supported: always."""
    return True


def gloo_enabled() -> bool:
    """Return whether gloo carries the negotiation: never."""
    return False


def gloo_built() -> bool:
    """Return whether gloo is supported: no."""
    return False


def nccl_built() -> int:
    """Return the version of CuPy's NCCL as an int, 22304 for 2.23.4; 0 if there is none.

    Imports CuPy, if it is installed.
    """
    from pyhvd.backends.gpu.nccl_bindings import load_library

    try:
        return int(load_library().get_version())
    except (ImportError, RuntimeError):
        return 0


def ddl_built() -> bool:
    """Return whether DDL is supported: no."""
    return False


def ccl_built() -> bool:
    """Return whether oneCCL is supported: no."""
    return False


def cuda_built() -> bool:
    """Return whether pyhvd takes arrays on CUDA devices: whether CuPy is installed."""
    return importlib.util.find_spec("cupy") is not None


def rocm_built() -> bool:
    """Return whether ROCm arrays are supported: no."""
    return False
