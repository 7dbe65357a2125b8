"""The doctor and ``--check-build`` with this Python's MPI, and with an MPI that hangs or is broken."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import pyhvd
from pyhvd.job.mpi.flavour import how_to_get
from tests.mpi.run_support import LIBRARY, MPIEXEC, Ended, bare_environment, pyhvdrun, run

DOCTOR = [sys.executable, "-m", "pyhvd", "doctor"]

# Every Python that finds the module imports it: it makes rank 1 alone hang somewhere.
STUCK = """
import os, time
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
"""


def doctor(*arguments: str, env: dict[str, str] | None = None) -> Ended:
    return run([*DOCTOR, *arguments], env)


def test_facts_and_a_trial() -> None:
    ended = doctor("-np", "3")
    assert ended.code == 0, ended.out + ended.err
    assert LIBRARY.name in ended.out
    assert MPIEXEC in ended.out
    assert re.search(r"^  ok +trial +3 ranks on ", ended.out, re.MULTILINE)
    assert re.search(r"^  ok +ring +1 B, 64 KiB, 4 MiB passed on", ended.out, re.MULTILINE)
    assert re.search(r"clocks +rank \d is \S+ \S?s ahead of rank 0, \+/- ", ended.out)
    for lane in ("MPI", "shared memory"):
        latency = rf"latency +\S+ [mun]?s for an allreduce of 4 bytes over {lane}$"
        bandwidth = rf"bandwidth +\S+ GB/s \(busbw \S+ GB/s\) for .* over {lane}$"
        assert re.search(latency, ended.out, re.MULTILINE)
        assert re.search(bandwidth, ended.out, re.MULTILINE)
    assert ended.err == "", "progress is for terminals"


@pytest.mark.slow
@pytest.mark.any_mpi
def test_json_and_a_trial_leaves_the_job_s_files_alone(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("t.json", "log.csv")]
    variables = dict(zip(("PYHVD_TIMELINE", "HOROVOD_AUTOTUNE_LOG"), files, strict=True))
    variables["PYHVD_FUSION_TRESHOLD"] = "1"
    ended = doctor("--json", env=variables)
    assert ended.code == 0, ended.err
    assert list(tmp_path.iterdir()) == []
    data = json.loads(ended.out)
    (facts,) = data["hosts"]
    assert facts["mpi"]["threads"] == "MPI_THREAD_MULTIPLE"
    assert facts["mpi"]["error"] == ""
    assert facts["variables"] == variables
    (findings,) = data["findings"].values()
    assert any("did you mean PYHVD_FUSION_THRESHOLD?" in finding["text"] for finding in findings)
    found = data["trial"]["found"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["ring"]["damaged"] == []
    assert [lane["name"] for lane in found["lanes"]] == ["MPI", "shared memory"]
    assert all(lane["latency"] > 0 and lane["seconds"] > 0 for lane in found["lanes"])


@pytest.mark.any_mpi
def test_no_run_starts_no_ranks() -> None:
    ended = doctor("--no-run")
    assert ended.code == 0, ended.out
    assert "trial\n" not in ended.out
    assert LIBRARY.name in ended.out


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    "arguments", [["-np", "0"], ["--nonsense"], ["--timeout", "-1"], ["--timeout", "soon"], ["x"]]
)
def test_bad_usage(arguments: list[str]) -> None:
    ended = doctor(*arguments)
    assert ended.code == 2
    assert "usage: python -m pyhvd doctor" in ended.err
    assert "invalid _" not in ended.err, "of a function of ours the user knows nothing"


@pytest.mark.any_mpi
def test_a_setting_that_breaks_init_is_a_problem() -> None:
    ended = doctor("--no-run", env={"PYHVD_CYCLE_TIME": "fast"})
    assert ended.code == 1
    assert "PROBLEM (environment): PYHVD_CYCLE_TIME='fast'" in ended.out


@pytest.mark.any_mpi
def test_with_checks_on_there_is_no_fast_lane() -> None:
    ended = doctor(env={"PYHVD_CHECK": "1"})
    assert ended.code == 0, ended.out
    assert "over shared memory" not in ended.out
    assert "by messages" in ended.out


# -- what hangs, and what is broken --------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """Return the folder of a fake mpi4py, to which a test adds an MPI module that hangs or fails."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9.9'\nclass rc: pass\n")
    return package


def _path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}:{Path(__file__).resolve().parents[2]}"}


@pytest.mark.any_mpi
def test_an_mpi_that_hangs_is_reported_in_time(fake: Path) -> None:
    (fake / "MPI.py").write_text("import time; time.sleep(600)")
    ended = doctor("--timeout", "1", env=_path(fake.parent))
    assert ended.code == 1
    text = " ".join(ended.out.split())
    assert "loading the MPI library (from mpi4py import MPI) has not ended within 1 s" in text
    assert "9.9" in text


@pytest.mark.any_mpi
def test_a_broken_mpi_is_reported(fake: Path) -> None:
    (fake / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    ended = doctor(env=_path(fake.parent))
    assert ended.code == 1
    text = " ".join(ended.out.split())
    assert (
        "PROBLEM (MPI): loading the MPI library (from mpi4py import MPI) failed (RuntimeError: cannot" in text
    )
    assert " ".join(how_to_get().split()) in text
    checked = run([sys.executable, "-m", "pyhvd.run", "--check-build"], _path(fake.parent))
    assert checked.code == 0
    assert "[ ] MPI" in checked.out
    assert "error: loading the MPI library" in checked.out


@pytest.mark.any_mpi
def test_an_mpi_that_crashes_does_not_take_the_doctor_with_it(fake: Path) -> None:
    (fake / "MPI.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    ended = doctor("--no-run", env=_path(fake.parent))
    assert ended.code == 1
    assert "failed (was killed by SIGSEGV (signal 11)" in " ".join(ended.out.split())


@pytest.mark.any_mpi
def test_an_extension_that_cannot_be_loaded_is_a_problem(tmp_path: Path) -> None:
    copy = tmp_path / "pyhvd"
    shutil.copytree(Path(pyhvd.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.c"))
    for extension in copy.glob("native/shared_memory.*.so"):
        extension.write_bytes(b"no library")
    ended = run(DOCTOR, {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert ended.code == 1, ended.err
    assert "PROBLEM (pyhvd): extension native.shared_memory cannot be imported (ImportError: " in " ".join(
        ended.out.split()
    )


@pytest.mark.any_mpi
def test_ranks_that_hang_are_named_with_what_they_did(tmp_path: Path) -> None:
    hang = "    import numpy.random\n    numpy.random.default_rng = lambda *seed: time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(STUCK + hang)
    ended = doctor("--timeout", "10", env=_path(tmp_path))
    assert ended.code == 1
    text = " ".join(ended.out.split())
    assert "PROBLEM (trial): 2 ranks have not ended within 10 s" in text
    assert "When it ended: ranks 0-1 at 'ring test'" in text


@pytest.mark.slow
@pytest.mark.any_mpi
def test_ranks_that_do_not_start_are_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK + "    time.sleep(600)\n")
    ended = doctor("--timeout", "8", env=_path(tmp_path))
    assert ended.code == 1
    text = " ".join(ended.out.split())
    assert re.search(r"only [01] of 2 ranks started in 4 s \(missing: (0, )?1\)", text)  # rank 0 may be late
    assert re.search(r"rank(s 0-| )1 had not started", text)


# -- under an mpiexec ---------------------------------------------------------------------------


def test_the_ranks_of_an_mpiexec_are_used() -> None:
    ended = run([MPIEXEC, "-n", "3", *DOCTOR, "--json"], bare_environment())
    assert ended.code == 0, ended.out + ended.err
    data = json.loads(ended.out[ended.out.index("{") :])
    assert len(data["hosts"]) == 1
    assert [rank["rank"] for rank in data["trial"]["found"]["ranks"]] == [0, 1, 2]
    assert data["hosts"][0]["mpi"]["error"] == ""
    assert data["hosts"][0]["mpiexec"] == MPIEXEC


@pytest.mark.any_mpi
def test_a_setting_that_breaks_init_is_a_problem_there_too() -> None:
    ended = run([MPIEXEC, "-n", "2", *DOCTOR], {**bare_environment(), "PYHVD_CYCLE_TIME": "fast"})
    assert ended.code == 1, ended.out + ended.err
    assert "PROBLEM (environment): PYHVD_CYCLE_TIME='fast'" in ended.out
    assert "PROBLEM (trial): ConfigError" in ended.out
    assert "ranks 0-1 at 'init()" in " ".join(ended.out.split())
    assert "Traceback" not in ended.out + ended.err


@pytest.mark.slow
@pytest.mark.any_mpi
def test_a_hang_under_mpiexec_ends_too(tmp_path: Path) -> None:
    hang = "    import numpy.random\n    numpy.random.default_rng = lambda *seed: time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(STUCK + hang)
    command = [MPIEXEC, "-n", "2", *DOCTOR, "--timeout", "10"]
    ended = run(command, {**bare_environment(), **_path(tmp_path)})
    assert ended.code != 0
    assert "has hung for 10 s at 'ring test'" in ended.err


@pytest.mark.any_mpi
def test_np_and_mpiexec_are_not_both_given() -> None:
    ended = run([MPIEXEC, "-n", "1", *DOCTOR, "-np", "2"], bare_environment())
    assert ended.code != 0
    assert "mpiexec has started these ranks already" in ended.err


# -- --check-build ---------------------------------------------------------------------------


@pytest.mark.any_mpi
def test_check_build() -> None:
    ended = pyhvdrun("-cb")
    assert ended.code == 0, ended.err
    assert ended.out.count("[X] MPI") == 2
    assert "[X] numpy" in ended.out
    assert "[ ] Gloo" in ended.out
    assert LIBRARY.name in ended.out
    assert "thread level: MPI_THREAD_MULTIPLE" in ended.out


@pytest.mark.any_mpi
def test_check_build_verbose_says_why() -> None:
    ended = pyhvdrun("--check-build", "--verbose")
    assert ended.code == 0, ended.err
    assert "[ ] NCCL  (CuPy finds none)" in ended.out
    assert "[ ] DDL  (pyhvd has none: MPI carries everything)" in ended.out
