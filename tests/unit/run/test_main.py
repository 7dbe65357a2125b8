"""``pyhvdrun``'s decision: a rank, a job on this host, a job on several hosts, or only a text."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyhvd.job.mpi.rank_env import RankEnv
from pyhvd.run import __main__ as command
from pyhvd.run.cli import parse
from pyhvd.run.entry import rank_entry
from pyhvd.run.hosts import selection
from pyhvd.run.hosts.clusters.detection import has_marks
from pyhvd.run.hosts.hosts import JobHosts
from pyhvd.run.launchers import local, many_hosts
from pyhvd.run.options import Options

SHELL = Path(__file__).parent / "hosts" / "clusters" / "slurm_shell.env"


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what was started; nothing is."""
    calls: list[tuple[Any, ...]] = []

    def start(code: int) -> Callable[..., int]:
        def started(*arguments: Any) -> int:
            calls.append(arguments)
            return code

        return started

    for name in list(os.environ):
        if has_marks([name]) or name.startswith(("PMI", "OMPI_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(selection, "_resolves_here", lambda _name: False)
    monkeypatch.setattr(local, "launch", start(7))
    monkeypatch.setattr(rank_entry, "run_rank", start(8))
    monkeypatch.setattr(many_hosts, "run", start(9))
    return calls


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pyhvdrun", *arguments])
    return command.main()


@pytest.fixture
def pmi() -> Iterator[socket.socket]:
    """Return a socket: a rank has one that leads to its launcher."""
    with socket.socket() as opened:
        yield opened


def set_all(monkeypatch: pytest.MonkeyPatch, path: Path, pmi: socket.socket | None = None) -> None:
    for line in path.read_text().splitlines():
        monkeypatch.setenv(*line.split("=", 1))
    if pmi is not None:
        monkeypatch.setenv("PMI_FD", str(pmi.fileno()))


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        (("-n", "3"), 3),
        (("-H", "localhost:2"), 2),
        (("--hosts", "localhost:2,127.0.0.1:2"), 4),
        (("-H", "localhost", "--slots-per-host", "4"), 4),
        (("-H", "localhost:2,h2:2", "-np", "1"), 1),
    ],
)
def test_a_job_on_this_host(
    arguments: tuple[str, ...],
    size: int,
    started: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(monkeypatch, *arguments, "x.py", "-n", "9") == 7
    ((options,),) = started
    assert options.num_proc == size
    assert options.program == ["x.py", "-n", "9"]


def test_a_job_on_several_hosts(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("h1 slots=2\nh2:1\n")
    for given in (("-H", "h1:2,h2:1"), ("-hostfile", str(tmp_path / "hosts"))):
        assert run(monkeypatch, *given, "--verbose", "x.py") == 9
        options, placed = started.pop()
        assert isinstance(placed, JobHosts)
        assert isinstance(options, Options)
        assert options.verbose
        assert [(each.host.name, each.ranks) for each in placed.hosts] == [
            ("h1", range(2)),
            ("h2", range(2, 3)),
        ]


def test_a_rank(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, SHELL.with_stem("slurm_srun"))
    assert run(monkeypatch, "x.py") == 8
    assert started[0][1] == RankEnv("unknown", 5, 7, 1, 3)


@pytest.mark.parametrize(
    ("system", "arguments", "message"),
    [
        ("mpich", ("-n", "2"), "mpiexec has started this rank already: use either mpiexec or -n, not both"),
        ("mpich", ("-H", "h1"), "mpiexec has started this rank already: use either mpiexec or -H, not both"),
        (
            "slurm_srun",
            ("--hostfile", "x"),
            "srun has started this rank already: use either srun or --hostfile, not both",
        ),
        (
            "torchrun",
            ("-n", "2"),
            "torchrun has started this process (RANK=3), and MPI does not know it: start the script with"
            " pyhvdrun alone, e.g. pyhvdrun -n 4 train.py",
        ),
        (
            "kubernetes_job",
            (),
            "this is pod 2 of an indexed Job of Kubernetes, which is no rank: use an MPIJob,",
        ),
    ],
)
def test_what_other_launchers_do_not_allow(
    system: str,
    arguments: tuple[str, ...],
    message: str,
    started: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pmi: socket.socket,
) -> None:
    set_all(monkeypatch, SHELL.with_stem(system), pmi)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments, "x.py")
    assert f"pyhvdrun: error: {message}" in capsys.readouterr().err
    assert not started


def test_a_shell_under_srun_starts_jobs(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like a rank alone: only the arguments tell."""
    set_all(monkeypatch, SHELL)
    assert run(monkeypatch, "x.py") == 8
    assert run(monkeypatch, "-n", "5", "x.py") == 9
    assert run(monkeypatch, "-H", "localhost:2", "x.py") == 7


def test_show_config_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pmi: socket.socket
) -> None:
    """One rank prints."""
    set_all(monkeypatch, SHELL.with_stem("mpich"), pmi)
    assert run(monkeypatch, "--show-config") == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PMI_RANK", "0")
    assert run(monkeypatch, "--show-config", "x.py") == 0
    assert capsys.readouterr().out.startswith(
        "rule: mpiexec has started this process as rank 0 of 4 on host "
    )


def test_show_config(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = "rsh {host} sh -c {command}"
    assert run(monkeypatch, "-H", "h1:2,h2", "--launch-agent", agent, "--show-config") == 0
    assert capsys.readouterr().out == (
        f"rule: -H\nhosts:\n  h1  2 slots  ranks 0-1\n  h2  1 slot   rank 2\nagent: {agent}\n"
    )
    assert not started


def test_ctrl_c_before_the_job_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_name: str) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(selection, "_resolves_here", interrupt)
    assert run(monkeypatch, "-H", "h1,h2", "x.py") == 130
    assert capsys.readouterr().err == "pyhvd: ended by SIGINT\n"


def test_flags_of_horovodrun_without_effect_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mpi", "--gloo", "--mpi"]
    assert parse([*flags, "-n", "2", "x.py"], under_mpiexec=False) == Options(program=["x.py"], num_proc=2)
    assert [line.split(":")[1] for line in capsys.readouterr().err.splitlines()] == [
        " --mpi has no effect",
        " --gloo has no effect",
    ]
    parse([*flags, "x.py"], under_mpiexec=True, tells=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "flag", ["--prefix-timestamp", "-prefix-timestamp", "--prefix-output-with-timestamp"]
)
def test_the_names_of_the_timestamp(flag: str) -> None:
    options = parse([flag, "-n", "2", "x.py"], under_mpiexec=False)
    assert (options.prefix_output, options.prefix_timestamp) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the number of ranks is missing: give e.g. -n 2"),
        (
            ("-H", "h1:x"),
            "-H: 'h1:x': slots must be a whole number of at least 1, not 'x'",
        ),
        (
            ("--hostfile", "/gone"),
            "--hostfile: cannot read /gone: [Errno 2] No such file or directory: '/gone'",
        ),
        (("--slots-per-host", "0"), "argument --slots-per-host/--slots: must be at least 1, not 0"),
        (
            ("--jsrun",),
            "argument --jsrun: jsrun starts the ranks itself: jsrun -n N python -m pyhvd.run script.py",
        ),
        (
            ("--launch-agent", "ssh {host}"),
            "argument --launch-agent: {command} is missing in 'ssh {host}': give e.g. 'ssh {host} {command}'",
        ),
    ],
)
def test_bad_usage(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments, "x.py")
    assert capsys.readouterr().err.splitlines()[-1] == f"pyhvdrun: error: {message}"


def test_a_child_of_a_rank_starts_jobs(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, pmi: socket.socket
) -> None:
    """It has the rank's variables, but not the rank's line to its launcher."""
    set_all(monkeypatch, SHELL.with_stem("mpich"), pmi)
    pmi.close()
    assert run(monkeypatch, "-n", "2", "x.py") == 7
    assert len(started) == 1
