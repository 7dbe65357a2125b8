"""The public API: its names, the stub, the signatures, and a cheap import."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd

ERRORS = (
    *("ConfigError", "CorruptionError", "DuplicateNameError", "HorovodInternalError"),
    "HorovodVersionMismatchError",
    *("HostsUpdatedInterrupt", "InternalError", "LaunchError", "MismatchError", "NotInitializedError"),
    "RankFailedError",
    *("RankValue", "RemoteError"),
    *("ShutDownError", "StallError", "TimelineError", "TransportError"),
    *("UnsupportedDtypeError", "UnsupportedOpError", "UnsupportedShapeError"),
)
OPS = ("Adasum", "Average", "Max", "Min", "Product", "Sum")
OTHERS = (
    "Compression",
    "Compressor",
    "Config",
    "Handle",
    "Histogram",
    "Hosts",
    "Ranks",
    "Metrics",
    "ProcessSet",
    "RankFilter",
    "ReduceOp",
    "__version__",
    "child_environment",
    "elastic",
    "empty",
    "empty_like",
    "global_process_set",
    "launch",
)
TOPOLOGY = (
    *("ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled"),
    *("is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled"),
    *("mpi_threads_supported", "nccl_built", "rank", "rocm_built", "size"),
)
RULE = [
    "average=None",
    "name=None",
    "op=None",
    "prescale_factor=1.0",
    "postscale_factor=1.0",
    "process_set=global",
]
RULE_SYNC = [*RULE[:2], "compression=none", *RULE[2:]]
SCATTER = ["name=None", "op=Average", "process_set=global", "prescale_factor=1.0", "postscale_factor=1.0"]
SCATTER_SYNC = [SCATTER[0], "compression=none", *SCATTER[1:]]
GATHER = ["name=None", "process_set=global"]
ROOTED = ["root_rank", *GATHER]
SPLIT = ["splits=None", *GATHER]

SIGNATURES: dict[str, list[str]] = {
    "allreduce": ["tensor", *RULE_SYNC],
    "allreduce_async": ["tensor", *RULE],
    "allreduce_": ["tensor", *RULE],
    "allreduce_async_": ["tensor", *RULE],
    "grouped_allreduce": ["tensors", *RULE_SYNC],
    "grouped_allreduce_async": ["tensors", *RULE],
    "grouped_allreduce_": ["tensors", *RULE],
    "grouped_allreduce_async_": ["tensors", *RULE],
    "allgather": ["tensor", *GATHER],
    "allgather_async": ["tensor", *GATHER],
    "grouped_allgather": ["tensors", *GATHER],
    "grouped_allgather_async": ["tensors", *GATHER],
    "broadcast": ["tensor", *ROOTED],
    "broadcast_async": ["tensor", *ROOTED],
    "broadcast_": ["tensor", *ROOTED],
    "broadcast_async_": ["tensor", *ROOTED],
    "alltoall": ["tensor", *SPLIT],
    "alltoall_async": ["tensor", *SPLIT],
    "reducescatter": ["tensor", *SCATTER_SYNC],
    "reducescatter_async": ["tensor", *SCATTER],
    "grouped_reducescatter": ["tensors", *SCATTER_SYNC],
    "grouped_reducescatter_async": ["tensors", *SCATTER],
    "join": ["device=-1"],
    "barrier": ["process_set=global"],
    "poll": ["handle"],
    "synchronize": ["handle"],
    "device_synchronize": ["timeout=None"],
    "init": ["comm=None", "process_sets=None"],
    "shutdown": [],
    "start_timeline": ["file_path", "mark_cycles=False"],
    "stop_timeline": [],
    "add_process_set": ["process_set"],
    "remove_process_set": ["process_set"],
    "broadcast_object": ["obj=None", "root_rank=0", "name=None", "process_set=global"],
    "allgather_object": ["obj", "name=None", "process_set=global"],
    "metrics": [],
}


def described(default: Any) -> str:
    """Return the public name of a default value."""
    if default is hvd.global_process_set:
        return "global"
    if default is hvd.Compression.none:
        return "none"
    return "Average" if isinstance(default, hvd.ReduceOp) and default is hvd.Average else repr(default)


def test_the_namespace_is_this() -> None:
    assert set(hvd.__all__) == {*ERRORS, *OPS, *OTHERS, *TOPOLOGY, *SIGNATURES}
    assert len(set(hvd.__all__)) == len(hvd.__all__)


def test_every_name_is_there() -> None:
    for name in hvd.__all__:
        assert getattr(hvd, name) is getattr(hvd, name)
    assert set(hvd.__all__) <= set(dir(hvd))
    with pytest.raises(AttributeError, match="module 'pyhvd' has no attribute 'allreduc'"):
        _ = hvd.allreduc  # type: ignore[attr-defined]


def test_a_name_of_horovods_that_is_missing_says_what_does_its_work() -> None:
    """The functions that the error message names exist."""
    remedy = r"has no attribute 'DistributedOptimizer': for torch use pyhvd\.torch, else call grouped"
    with pytest.raises(AttributeError, match=remedy):
        _ = hvd.DistributedOptimizer  # type: ignore[attr-defined]
    assert not hasattr(hvd, "DistributedOptimizer")
    for name, text in hvd._BY_HAND.items():
        named = re.findall(r"\b(?<!\.)(\w+)\(\)", text)
        assert named, name
        assert set(named) <= set(hvd.__all__), name


def test_type_checkers_see_the_same_names() -> None:
    source = ast.parse(Path(hvd.__file__).read_text())
    names = {"__version__": ""}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("pyhvd"):
            for alias in node.names:
                assert alias.asname == alias.name, "a checker re-exports only names imported as themselves"
                names[alias.name] = node.module
    assert sorted(names) == sorted(hvd.__all__)
    for name, module in names.items():
        if module:
            assert getattr(importlib.import_module(module), name) is getattr(hvd, name), name


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_horovods(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters.values()
    found = [p.name if p.default is p.empty else f"{p.name}={described(p.default)}" for p in parameters]
    assert found == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize("name", TOPOLOGY)
def test_topology_takes_no_arguments(name: str) -> None:
    assert not inspect.signature(getattr(hvd, name)).parameters


@pytest.mark.parametrize("name", [*SIGNATURES, *TOPOLOGY, *ERRORS])
def test_every_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(hvd, name))


def test_ops_are_horovods_numbers() -> None:
    assert [int(getattr(hvd, op)) for op in ("Average", "Sum", "Adasum", "Min", "Max", "Product")] == list(
        range(6)
    )


@pytest.mark.parametrize("module", ["pyhvd", "pyhvd.run.__main__, pyhvd.run.launchers.local"])
def test_importing_costs_nothing(module: str) -> None:
    """Neither what programs import, nor what starts ranks on this host before they do, once a job."""
    code = (
        f"import sys, threading, {module};"
        "heavy = {'numpy', 'mpi4py', 'mpi4py.MPI', 'msgspec', 'cloudpickle', 'cupy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy or threading.active_count() > 1 else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _programs() -> dict[str, list[str]]:
    """Return the modules that run as ``python -m``, by the package above them."""
    found = dict[str, list[str]]()
    for path in sorted(Path(hvd.__file__).parent.rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text() and path.stem != "__main__":
            parts = path.relative_to(Path(hvd.__file__).parents[1]).with_suffix("").parts
            found.setdefault(".".join(parts[:-1]), []).append(".".join(parts))
    return found


@pytest.mark.parametrize("package", _programs())
def test_a_package_does_not_import_its_programs(package: str) -> None:
    """Otherwise ``python -m`` warns, and has the module twice."""
    programs = _programs()[package]
    code = f"import sys, {package}; sys.exit(', '.join({{*{programs}}} & {{*sys.modules}}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_but_init_touches_mpi() -> None:
    code = (
        "import sys, pyhvd; [getattr(pyhvd, name) for name in pyhvd.__all__];"
        "pyhvd.mpi_built(), pyhvd.nccl_built(), pyhvd.is_initialized(), pyhvd.shutdown();"
        "sys.exit('mpi4py.MPI' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_before_init_only_questions_about_the_build_are_answered() -> None:
    assert not hvd.is_initialized()
    assert hvd.mpi_built()
    assert hvd.nccl_built() == 0
    for name in (
        "rank",
        "size",
        "local_rank",
        "local_size",
        "cross_rank",
        "cross_size",
        "mpi_threads_supported",
    ):
        with pytest.raises(hvd.NotInitializedError, match="pyhvd has not been initialized"):
            getattr(hvd, name)()
    for call in (lambda: hvd.barrier(), lambda: hvd.join(), lambda: hvd.allreduce(1.0)):
        with pytest.raises(hvd.NotInitializedError):
            call()
    hvd.shutdown()
