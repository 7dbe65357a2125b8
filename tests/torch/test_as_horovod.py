"""Programs that import ``horovod``, through the distribution and through pyhvdrun."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT

PROGRAMS = ROOT / "tests" / "torch" / "programs"
NAMES = (
    "mnist",
    "synthetic_benchmark",
    "accumulation",
    "mixed_precision",
    "sparse_embedding",
    "timeline",
)
_PATHS = [str(PROGRAMS / f"{name}.py") for name in ("all_of_them", *NAMES)]
COMPAT = str(ROOT / "compat" / "horovod")


@functools.cache
def _run_all(by: str) -> subprocess.CompletedProcess[str]:
    """Run all programs on 2 ranks, in one job."""
    if by == "as_horovod":
        return _run(sys.executable, "-m", "pyhvd.run", "-np", "2", "--as-horovod", *_PATHS)
    with tempfile.TemporaryDirectory() as folder:
        command = (*_horovodrun(folder), "-np", "2", "python", "-u")
        return _run(*command, *_PATHS, PYTHONPATH=COMPAT)


def _horovodrun(folder: str | Path) -> tuple[str, str]:
    """Return the command line of horovodrun, as pip makes it."""
    script = Path(folder, "horovodrun")
    script.write_text("import sys\nfrom pyhvd.run.__main__ import horovodrun\nsys.exit(horovodrun())\n")
    return sys.executable, str(script)


def _run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, env=os.environ | env
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", [pytest.param("as_horovod", marks=pytest.mark.any_mpi), "horovodrun"])
def test_a_program_for_horovod_runs_unchanged(by: str, name: str) -> None:
    done = _run_all(by)
    assert f"passed: {PROGRAMS / name}.py" in done.stdout, done.stdout + done.stderr
    if name == NAMES[-1]:
        assert done.returncode == 0, done.stderr
    if name == "mnist":
        assert "2 ranks, loss" in done.stdout
    if name == "synthetic_benchmark":
        assert "Total img/sec on 2 ranks" in done.stdout


def test_horovod_run_of_a_function() -> None:
    done = _run(sys.executable, str(PROGRAMS / "mnist.py"), "--num-proc", "2", PYTHONPATH=COMPAT)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, loss" in done.stdout


def test_two_owners_of_the_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "RECORD").write_text("horovod/__init__.py,,\n")
    monkeypatch.setenv("PYTHONPATH", f"{COMPAT}:{tmp_path}")
    done = subprocess.run(
        [sys.executable, "-c", "import horovod"], capture_output=True, text=True, check=False
    )
    assert "both pyhvd-horovod and horovod 0.28.1 are installed" in done.stderr
    assert "pip uninstall -y horovod pyhvd-horovod" in done.stderr


# What Horovod's tests and examples, and libraries, import of each module.
IMPORTS = {
    "": "run __version__",
    "common.basics": "HorovodBasics",
    "common.exceptions": "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    "common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "common.util": "_cache extension_available gloo_built mpi_built env nccl_built ddl_built ccl_built"
    " gpu_available check_extension get_ext_suffix split_list is_iterable num_rank_is_power_2",
    "runner": "run",
    "runner.elastic.discovery": "HostDiscovery HostDiscoveryScript FixedHosts",
    "runner.launch": "run_commandline gloo_built mpi_built",
    "runner.util.threads": "in_thread",
    "spark.common.store": "Store",
    "torch": "_check_has_gpu mpi_ops optimizer functions compression sync_batch_norm SyncBatchNorm"
    " sparse_allreduce_async broadcast_object allgather_object HorovodInternalError Compression",
    "torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "torch.mpi_ops": "_basics synchronize poll is_homogeneous Sum Average Adasum rank size allreduce_async_"
    " HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast HorovodGroupedAllgather"
    " HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter",
    "torch.optimizer": "DistributedOptimizer _DistributedOptimizer",
    "torch.sync_batch_norm": "SyncBatchNorm",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_what_programs_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    module = importlib.import_module(f"horovod.{name}".rstrip("."))
    assert not [each for each in IMPORTS[name].split() if not hasattr(module, each)]


def test_what_programs_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    util = importlib.import_module("horovod.common.util")
    assert util.extension_available("torch")
    assert not util.extension_available("tensorflow")
    assert util.mpi_built()
    with pytest.raises(ImportError):  # after which Ignite imports horovod.run
        importlib.import_module("horovod.run.runner")
    with pytest.raises(ValueError, match="init"):
        importlib.import_module("horovod.torch").rank()


def test_what_finds_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    discovery = importlib.import_module("horovod.runner.elastic.discovery")
    fixed = discovery.FixedHosts({"h1": 2})
    assert fixed.find_available_hosts_and_slots() == {"h1": 2}
    fixed.set({"h2": 1})
    assert fixed.find_available_hosts_and_slots() == {"h2": 1}
    script = discovery.HostDiscoveryScript("echo h1; echo h2:3", 4)
    assert script.find_available_hosts_and_slots() == {"h1": 4, "h2": 3}
    for command, text in [("echo no >&2; exit 3", "ended with code 3: no"), ("echo h:x", "bad line: line 1")]:
        with pytest.raises(RuntimeError, match=text):
            discovery.HostDiscoveryScript(command).find_available_hosts_and_slots()


@pytest.mark.parametrize("name", ["spark.keras", "spark.lightning", "spark.torch"])
def test_missing_modules_say_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    with pytest.raises(ImportError, match=r"^pyhvd has no .*: "):
        importlib.import_module(f"horovod.{name}")


@pytest.mark.parametrize("name", ["tensorflow", "keras", "mxnet", "ray"])
def test_other_frameworks_say_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPAT)
    with pytest.raises(ImportError, match=f"no horovod.{name}.*grouped_allreduce"):
        importlib.import_module(f"horovod.{name}")


_CHILDREN = """
    import multiprocessing

    def work(kind):
        import horovod.common.util
        return kind + " child: " + horovod.__name__

    if __name__ == "__main__":
        for kind in ("spawn", "forkserver"):
            with multiprocessing.get_context(kind).Pool(1) as pool:
                print(pool.apply(work, (kind,)))
"""


def test_children_of_a_rank_find_horovod_too(tmp_path: Path) -> None:
    program = tmp_path / "with_children.py"
    program.write_text(textwrap.dedent(_CHILDREN))
    done = _run(sys.executable, "-m", "pyhvd.run", "-np", "2", "--as-horovod", str(program))
    assert done.returncode == 0, done.stderr
    for kind in ("spawn", "forkserver"):
        assert done.stdout.count(f"{kind} child: horovod") == 2


def test_horovodrun_runs_other_commands(tmp_path: Path) -> None:
    done = _run(*_horovodrun(tmp_path), "-np", "2", "sh", "-c", "echo its word is $0; exit 3", "this")
    assert done.returncode == 3, done.stderr
    assert "its word is this" in done.stdout
    assert "exited with code 3" in done.stderr
