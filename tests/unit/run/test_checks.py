"""What hosts must have, and which variables reach them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.driver.agent_source import problem, version_problem
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Facts, Hello
from pyhvd.job.mpi.flavour import Flavour
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER, to_send
from pyhvd.job.mpi.rendezvous import PmiRendezvous, Rendezvous
from pyhvd.run.cli import parse
from pyhvd.run.launchers.many_hosts import choose_rendezvous


def test_what_a_host_lacks_has_a_remedy() -> None:
    own = Facts("MPICH", "MPICH 5.0.2", True, "abc")
    lacking = {
        "no MPI": Facts("", "no MPI", True, "abc"),
        "mpi4py is built on Open MPI 5": Facts("Open MPI", "Open MPI 5", True, "abc"),
        "--chdir": Facts("MPICH", "MPICH 5.0.2", False, ""),
        "there is no script train.py in /work": Facts("MPICH", "MPICH 5.0.2", True, ""),
        "is another than the launcher's": Facts("MPICH", "MPICH 4.3", True, "abd"),
    }
    for text, facts in lacking.items():
        assert text in problem(own, facts, "/work", "train.py")
    assert problem(own, own, "/work", "train.py") == ""
    assert problem(own, Facts("MPICH", "MPICH 4.3", True, ""), "/work", "") == ""
    open_mpi = Facts("Open MPI", "Open MPI 5.0.1", True, "")
    assert problem(open_mpi, open_mpi, "/work", "") == ""
    assert "another MPI family than the launcher's Open MPI 5.0.1: install the same MPI" in problem(
        open_mpi, own, "/work", ""
    )


MPICH_5 = Flavour(MPICH, "5.0.2", "MPICH")
OPEN_MPI = Flavour(OPENMPI, "5.0.11", "Open MPI")


@pytest.mark.parametrize(
    ("library", "flags", "expected"),
    [
        (MPICH_5, [], PmiRendezvous),
        (MPICH_5, ["--launcher", "pmi"], PmiRendezvous),
        (OPEN_MPI, [], MpiexecRendezvous),
        (OPEN_MPI, ["--launcher", "mpiexec", "--mpi-args", "--map-by node"], MpiexecRendezvous),
    ],
)
def test_how_ranks_find_each_other(
    library: Flavour, flags: list[str], expected: type[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyhvd.run.launchers.many_hosts.find_mpiexec", lambda _: "mpiexec")
    assert type(choose_rendezvous(parse([*flags, "x.py"], under_mpiexec=False), library)) is expected


@pytest.mark.parametrize(
    ("library", "flags", "text"),
    [
        (MPICH_5, ["--launcher", "mpiexec"], "is for Open MPI on many hosts, but mpi4py is built on MPICH"),
        (MPICH_5, ["--mpi-args", "-x A=b"], "as mpi4py is built on MPICH 5.0.2: leave them out, and set"),
        (OPEN_MPI, ["--launcher", "pmi"], "is for MPICH and Intel MPI, but mpi4py is built on Open MPI"),
        (Flavour(OTHER, "1", "some MPI"), [], "built on some MPI 1, but many hosts need MPICH, Intel MPI or"),
    ],
)
def test_a_way_that_this_mpi_does_not_have(library: Flavour, flags: list[str], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        choose_rendezvous(parse([*flags, "x.py"], under_mpiexec=False), library)


def test_versions_must_agree() -> None:
    own = Hello("1.2.3", "3.12.4", 0.0)
    assert version_problem(own, Hello("1.2.3", "3.12.9", 9.0)) == ""
    assert "pip install pyhvd==1.2.3" in version_problem(own, Hello("1.2.2", "3.12.4", 0.0))
    assert "--python" in version_problem(own, Hello("1.2.3", "3.11.4", 0.0))


def test_variables_of_the_launchers_own_host_and_job_stay_there() -> None:
    environ = dict.fromkeys(
        [
            *(b"HOME", b"TERM", b"TERM_PROGRAM", b"SSH_AUTH_SOCK", b"XDG_RUNTIME_DIR", b"TMPDIR"),
            *(b"CUDA_VISIBLE_DEVICES", b"GPU_DEVICE_ORDINAL", b"ZE_AFFINITY_MASK"),
            *(b"SLURM_JOB_ID", b"SLURMD_NODENAME", b"PMI_RANK", b"BASH_FUNC_ml%%", b"a.b", b"1A"),
        ],
        b"x",
    )
    kept = {b"PATH": b"/bin", b"PYTHONPATH": b"/code", b"ODD": b"\xff\n'\"", b"LD_LIBRARY_PATH": b"/lib"}
    assert dict(to_send(environ | kept, {})) == kept
    assert dict(to_send(environ, {"TMPDIR": "/scratch"})) == {b"TMPDIR": b"/scratch"}


@given(st.dictionaries(st.from_regex(r"\AA[A-Z0-9_]{0,9}\Z"), st.binary(max_size=50), max_size=5))
def test_values_are_sent_bit_by_bit(environ: dict[str, bytes]) -> None:
    given_bytes = {os.fsencode(name): value for name, value in environ.items()}
    assert dict(to_send(given_bytes, {})) == given_bytes
