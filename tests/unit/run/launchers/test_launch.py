"""``pyhvd.launch`` and ``pyhvd.Hosts``: the agents are local commands, the ranks are real."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.job.driver import kept_agents
from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_library
from tests.many_hosts import LOCAL, PATIENCE_S, local_agent

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")
TWO: dict[str, Any] = {"hosts": "h1:2,h2:2", "launch_agent": LOCAL}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        family = find_library().family
    except LaunchError as exc:
        pytest.skip(str(exc))
    TWO["launch_agent"] = local_agent(family)


@pytest.fixture(autouse=True)
def _nothing_remains() -> Iterator[None]:
    """Each test ends its processes, and closes its descriptors."""
    before = _descriptors()
    yield
    assert _children() == []
    gc.collect()
    assert _descriptors() <= before


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> list[int]:
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended meanwhile
            children += map(int, (task / "children").read_text().split())
    return children


class OwnError(Exception):
    """An error that ranks and driver know by its module."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        self.number = number


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def numbers() -> tuple[str, ...]:
    names = ("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return tuple(os.environ[f"HOROVOD_{name}"] for name in names)


def fail_on_1(act: Callable[[], Any]) -> None:
    if rank() == 1:
        act()
    time.sleep(1000)


def test_results_in_rank_order_with_args_and_kwargs(capfd: pytest.CaptureFixture[str]) -> None:
    def add(a: int, b: int = 0) -> int:
        return rank() + a + b

    assert hvd.launch(add, (10,), {"b": 100}, np=3) == [110, 111, 112]
    assert capfd.readouterr() == ("", "")


def test_type_checkers_know_what_is_returned() -> None:
    """mypy checks these; at run time they change nothing."""
    assert_type(hvd.launch(rank), list[int])
    with hvd.Hosts() as hosts:
        assert_type(hosts.launch(numbers), list[tuple[str, ...]])


def test_one_rank_by_default_and_num_proc_as_in_horovod() -> None:
    assert hvd.launch(numbers) == [(os.uname().nodename, "0", "1", "0", "1", "0", "1")]
    assert hvd.launch(rank, num_proc=2) == [0, 1]


def test_timeouts_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "0.001")
    with pytest.raises(LaunchError, match=r"0\.001 s"):
        hvd.launch(rank, np=1)
    assert hvd.launch(rank, np=1, start_timeout=60) == [0]
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "soon")
    with pytest.raises(hvd.ConfigError, match="HOROVOD_ELASTIC_TIMEOUT='soon': expected a number of seconds"):
        hvd.launch(rank, np=1, min_num_proc=1, start_timeout=60)


def test_ranks_are_numbered_host_by_host(tmp_path: Path) -> None:
    expected = [
        ("h1", "0", "3", "0", "2", "0", "2"),
        ("h1", "1", "3", "1", "2", "0", "1"),
        ("h2", "2", "3", "0", "1", "1", "2"),
    ]
    hostfile = tmp_path / "hosts"
    hostfile.write_text("h1 slots=2\nh2:1\n")
    assert hvd.launch(numbers, hostfile=hostfile, launch_agent=TWO["launch_agent"]) == expected


def test_training_over_all_ranks() -> None:
    def train() -> tuple[int, int, list[float]]:
        hvd.init()
        total = hvd.allreduce(np.ones(3), op=hvd.Sum)
        return hvd.rank(), hvd.cross_size(), total.tolist()

    assert hvd.launch(train, **TWO) == [(number, 2, [4.0, 4.0, 4.0]) for number in range(4)]


def test_a_result_of_several_parts_from_each_rank() -> None:
    """More than the credit, so that the agent waits for the driver; and every byte."""

    def make(size: int) -> bytes:
        return np.arange(rank(), rank() + size, dtype=np.uint32).tobytes()

    size = 3_000_001
    for number, result in enumerate(hvd.launch(make, (size,), np=2)):
        assert result == np.arange(number, number + size, dtype=np.uint32).tobytes()


def test_arguments_of_several_parts() -> None:
    given = np.arange(1 << 20)
    assert hvd.launch(lambda array: int(array.sum()), (given,), np=2) == [int(given.sum())] * 2


def test_a_module_beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("import os\ndef here(): return os.environ['HOROVOD_RANK'] + 'here'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside  # type: ignore[import-not-found]

    assert hvd.launch(beside.here, np=2) == ["0here", "1here"]


@pytest.mark.parametrize("where", [{"np": 2}, TWO])
def test_the_exception_of_a_rank_is_the_cause(where: dict[str, Any]) -> None:
    def fail() -> None:
        raise OwnError(7, "seven")

    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of \d on host \S+ failed: OwnError: ") as caught:
        hvd.launch(fail_on_1, (fail,), **where)
    assert (caught.value.rank, caught.value.host) == (1, "h1" if where is TWO else os.uname().nodename)
    cause = caught.value.__cause__
    assert type(cause) is OwnError
    assert cause.number == 7
    assert isinstance(cause.__cause__, hvd.RemoteError)
    assert 'raise OwnError(7, "seven")' in cause.__cause__.traceback


def _unsendable() -> None:
    raise OwnError(7, threading.Lock())  # type: ignore[arg-type]


def _unreadable() -> None:
    class Unreadable(Exception):
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("no number",)

    raise Unreadable


def _large() -> None:
    raise OwnError(7, "x" * (1 << 21))


@pytest.mark.parametrize("act", [_unsendable, _unreadable, _large])
def test_an_exception_that_cannot_be_sent_is_told_as_text(act: Callable[[], None]) -> None:
    with pytest.raises(hvd.RankFailedError) as caught:
        hvd.launch(fail_on_1, (act,), np=2)
    cause = caught.value.__cause__
    assert isinstance(cause, hvd.RemoteError)
    assert act.__name__ in cause.traceback


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: sys.exit(3), r"called sys\.exit\(3\) and returned nothing"),
        (lambda: os._exit(0), "exited with code 0 before the function returned"),
    ],
)
def test_a_rank_that_ends_without_an_exception(act: Callable[[], None], text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(hvd.RankFailedError, match=f"rank 1 of 2 on host .* {text}") as caught:
        hvd.launch(fail_on_1, (act,), np=2)
    assert caught.value.__cause__ is None
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("seconds", "given", "text"),
    [
        (0, {}, "ended without calling init()"),
        (100, {"start_timeout": 3}, "has not called init() within the start timeout of 3 s"),
    ],
)
@pytest.mark.parametrize("by_import", [True, False])
def test_a_rank_that_does_not_come_to_init(
    by_import: bool, seconds: float, given: dict[str, Any], text: str
) -> None:
    """The other waits in MPI_Init, which the import of mpi4py.MPI has called, or init() itself."""

    def fn() -> None:
        import mpi4py

        mpi4py.rc.initialize = by_import
        time.sleep(seconds) if rank() else hvd.init()

    with pytest.raises(hvd.RankFailedError) as failed:
        hvd.launch(fn, np=2, **given)
    told = str(failed.value).removesuffix(": every rank must call pyhvd.init(), or none")
    assert told == f"rank 1 of 2 on host {socket.gethostname()} {text}, and rank 0 waits for it there"
    assert failed.value.rank == 1


def _fork(act: Callable[[], Any]) -> Any:
    """Return how a forked child has ended; in the child, what `act` returns."""
    pid = os.fork()
    return act() if pid == 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("act", "code"),
    [(lambda: sys.exit(3), 3), (lambda: sys.exit("the helper has ended"), 1), (lambda: 1 / 0, 1), (int, 0)],
)
def test_a_forked_child_is_not_taken_for_its_rank(
    capfd: pytest.CaptureFixture[str], act: Callable[[], Any], code: int
) -> None:
    """Neither a failure of the child counts, nor what the function returns in it; MPI stays up."""

    def fn() -> tuple[int, float]:
        hvd.init()
        ended = _fork(act)
        return ended, float(hvd.allreduce(np.float64(1), op=hvd.Sum, name="x")) if ended else 0.0

    assert hvd.launch(fn, np=2) == [(code, 2.0 if code else 0.0)] * 2
    assert "MPI" not in capfd.readouterr().err


def test_a_result_that_cannot_be_pickled_is_the_ranks_failure() -> None:
    with pytest.raises(hvd.RankFailedError, match="TypeError"):
        hvd.launch(threading.Lock)


def test_a_result_that_cannot_be_unpickled_here() -> None:
    class Unreadable:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("no number",)

    with pytest.raises(LaunchError, match="rank 0 returned cannot be unpickled on the driver: ValueError"):
        hvd.launch(Unreadable)


def test_output_goes_to_the_given_files_and_copies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        print("out")
        print("err", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    hvd.launch(write, np=2, stdout=out, stderr=err, output_filename=str(tmp_path / "copies"))
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:out", "[1]<stdout>:out"]
    assert sorted(err.getvalue().splitlines()) == ["[0]<stderr>:err", "[1]<stderr>:err"]
    assert (tmp_path / "copies/rank.1/stdout").read_text() == "out\n"
    assert capfd.readouterr() == ("", "")


def test_environment_and_directory_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> tuple[str, str, str, bool]:
        secret = any("PYHVD_JOB" in name for name in os.environ)
        return os.getcwd(), os.environ["OURS"], os.environ["OWN"], secret

    monkeypatch.setenv("OURS", "a\n'b")
    found = hvd.launch(look, env={"OWN": "c=d"}, directory=str(tmp_path), **TWO)
    assert found == [(str(tmp_path), "a\n'b", "c=d", False)] * 4
    with pytest.raises(ValueError, match=r"network_interfaces: 'a b': expected an interface, a subnet"):
        hvd.launch(os.getcwd, network_interfaces="a b")


def test_every_hosts_problem_is_told_with_the_names_of_arguments(tmp_path: Path) -> None:
    agent = "sh -c 'case {host} in h1) {command};; h2) echo nobody here >&2; exit 1;; esac'"
    with pytest.raises(LaunchError, match="host h2: the agent did not start: nobody here"):
        hvd.launch(rank, hosts="h1:1,h2:1", launch_agent=agent)
    with pytest.raises(LaunchError, match=r"host h1: there is no directory .* name another with directory"):
        hvd.launch(rank, directory=str(tmp_path / "nowhere"), **TWO)
    agent = "sh -c ': {host} {command}; exec sleep 1000'"
    with pytest.raises(LaunchError, match=r"has not started within 1 s \(start_timeout\)"):
        hvd.launch(rank, hosts="h1:1,h2:1", launch_agent=agent, start_timeout=1)


def test_the_hosts_of_an_allocation_but_not_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as without_srun:
        without_srun.setenv("PATH", "/nowhere")
        with pytest.raises(LaunchError) as caught:
            hvd.launch(rank)
    assert [line.split(": [")[0] for line in str(caught.value).splitlines()] == [
        "host n1: srun cannot be started",
        "host n2: srun cannot be started",
    ]
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert hvd.launch(rank) == [0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hosts": "h1", "hostfile": "hosts"}, "hosts and hostfile both choose the hosts"),
        ({"hosts": "h1:x"}, "hosts: 'h1:x': slots must be a whole number"),
        ({"hosts": ["h1"]}, r"hosts=\['h1'\]: expected a str"),
        ({"hosts": "h1:2", "np": 3}, "np 3 is more than the 2 slots"),
        ({"hostfile": "/nowhere/hosts"}, "hostfile: cannot read /nowhere/hosts"),
        ({"np": 0}, "np=0: expected a number of ranks"),
        ({"np": 2, "num_proc": 3}, "np=2 and num_proc=3 are both"),
        ({"fn": 3}, "fn=3: expected a function"),
        ({"args": "text"}, "args='text': expected a sequence"),
        ({"kwargs": [1]}, r"kwargs=\[1\]: expected a mapping"),
        ({"env": {"A=B": "c"}}, "env: 'A=B'"),
        ({"stdout": io.BytesIO()}, "stdout=.*: expected a file that is open for text"),
        ({"start_timeout": 0}, "start_timeout=0: expected a number of seconds"),
        ({"ssh_port": 0}, "ssh_port=0: expected"),
        ({"ssh_identity_file": 3}, "ssh_identity_file=3: expected"),
        ({"ssh_port": 22, "launch_agent": LOCAL}, "ssh_port and ssh_identity_file are for ssh"),
        ({"launch_agent": "ssh {host}"}, r"launch_agent: \{command\} is missing"),
        ({"executable": ""}, "executable='': expected"),
        ({"verbose": "much"}, "verbose='much': expected"),
        ({"min_num_proc": 0}, "min_num_proc=0: expected a number of ranks"),
        ({"slots": 2}, "slots is for elastic jobs: give min_num_proc too"),
        ({"min_num_proc": 1, "slots": 0}, "slots=0: expected a whole number above 0"),
        ({"discovery": "x"}, "discovery='x': expected a function that returns the hosts"),
        ({"discovery": dict}, "discovery=<class 'dict'>: expected a function that returns the hosts"),
        ({"discovery": list, "host_discovery_script": "x"}, "host_discovery_script and discovery both find"),
        ({"discovery": lambda: ["h1"], "hosts": "h1"}, "discovery finds the hosts: leave hosts and"),
        ({"min_num_proc": 1, "reset_limit": -1}, "reset_limit=-1: expected"),
        ({"min_num_proc": 1, "cooldown_range": (5, 2)}, r"cooldown_range=\(5, 2\): expected"),
        ({"min_num_proc": 1, "elastic_timeout": 0}, "elastic_timeout=0: expected"),
        ({"min_num_proc": 1, "elastic_timeout": "5"}, "elastic_timeout='5': expected"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.launch(**({"fn": rank} | arguments))


def test_an_unknown_argument() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nprocs'"):
        hvd.launch(rank, nprocs=2)  # type: ignore[call-arg]


@pytest.mark.slow
def test_eight_threads_at_once_mix_nothing_up(capfd: pytest.CaptureFixture[str]) -> None:
    def work(number: int, out: int) -> list[tuple[int, int]]:
        os.write(1, b"%d\n" % number * 1000)
        return [(number, rank())] * out

    def launch(number: int) -> tuple[list[Any], str]:
        out = io.StringIO()
        return hvd.launch(work, (number, 50_000), np=2, stdout=out), out.getvalue()

    with ThreadPoolExecutor(8) as pool:
        for number, (results, out) in enumerate(pool.map(launch, range(8))):
            assert results == [[(number, each)] * 50_000 for each in range(2)]
            assert sorted(out.splitlines()) == [
                f"[{each}]<stdout>:{number}" for each in range(2) for _ in range(1000)
            ]
    assert capfd.readouterr() == ("", "")


def test_inside_asyncio() -> None:
    async def both() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(hvd.launch, rank, np=2) for _ in range(2)))

    assert asyncio.run(both()) == [[0, 1], [0, 1]]


def test_a_job_within_a_job() -> None:
    def outer() -> list[int]:
        return hvd.launch(rank, np=2)

    assert hvd.launch(outer, np=2) == [[0, 1], [0, 1]]


def test_ctrl_c_ends_the_ranks(tmp_path: Path) -> None:
    program = f"""
        import os, signal, time
        import pyhvd as hvd

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

        def wait():
            rank = os.environ["HOROVOD_RANK"]
            open(f"{tmp_path}/pid.{{rank}}", "w").write(str(os.getpid()))
            print("up", flush=True)
            time.sleep(1000)

        try:
            hvd.launch(wait, np=2)
        except KeyboardInterrupt:
            print("interrupted")
    """
    job = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    for _ in range(2):
        assert job.stdout.readline().endswith("up\n")
    job.send_signal(signal.SIGINT)
    try:
        assert job.communicate(timeout=PATIENCE_S)[0] == "interrupted\n"
    finally:
        job.kill()
    assert job.returncode == 0
    for number in range(2):
        assert not Path(f"/proc/{(tmp_path / f'pid.{number}').read_text()}").exists()


def _agents() -> list[int]:
    return [child for child in _children() if b"pyhvd.job.agent.host_agent" in _words(child)]


def _words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_the_agents_stay_between_two_jobs() -> None:
    with hvd.Hosts(**TWO) as hosts:
        assert hosts.launch(rank) == [0, 1, 2, 3]
        agents = _agents()
        assert len(agents) == 2
        assert hosts.launch(numbers, np=1) == [("h1", "0", "1", "0", "1", "0", "1")]
        assert hosts.launch(lambda: os.environ["A"], env={"A": "b"}) == ["b"] * 4
        assert _agents() == agents
    with pytest.raises(ValueError, match="closed"):
        hosts.launch(rank)


def test_after_a_failed_job_the_agents_are_started_again() -> None:
    with hvd.Hosts(**TWO) as hosts:
        hosts.launch(rank)
        with pytest.raises(hvd.RankFailedError, match="rank 1"):
            hosts.launch(fail_on_1, (lambda: sys.exit(1),))
        assert _agents() == []
        assert hosts.launch(rank) == [0, 1, 2, 3]


def test_an_agent_that_was_lost_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_agents, "SILENT_S", 2.5)
    with hvd.Hosts(**TWO) as hosts:
        hosts.launch(rank)
        lost, kept = _agents()
        os.kill(lost, signal.SIGKILL)
        assert hosts.launch(rank) == [0, 1, 2, 3]
        assert kept in _agents()
        for agent in _agents():  # one that cannot answer
            os.kill(agent, signal.SIGSTOP)

        time.sleep(2.6)
        assert hosts.launch(rank) == [0, 1, 2, 3]
        assert kept not in _agents()


def test_two_jobs_at_once_have_agents_of_their_own() -> None:
    with hvd.Hosts(np=2) as hosts, ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(lambda _: hosts.launch(rank), range(4))) == [[0, 1]] * 4
        assert 1 <= len(_agents()) <= 4


def test_an_agent_whose_driver_is_gone_ends() -> None:
    program = f"""
        import os, time
        import pyhvd as hvd

        hosts = hvd.Hosts("h1:1,h2:1", launch_agent={TWO["launch_agent"]!r})
        hosts.launch(os.getpid)
        children = open(f"/proc/self/task/{{os.getpid()}}/children").read()
        print(children, flush=True)
        os.kill(os.getpid(), 9)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, check=False
    )
    agents = [int(word) for word in ended.stdout.split()]
    assert len(agents) == 2
    until = time.monotonic() + PATIENCE_S
    while any(_lives(agent) for agent in agents) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_lives(agent) for agent in agents)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_keeps_its_rank_and_host_when_it_is_pickled() -> None:
    copy = pickle.loads(pickle.dumps(hvd.RankFailedError("rank 3 failed", 3, "h2")))
    assert (str(copy), copy.rank, copy.host) == ("rank 3 failed", 3, "h2")
