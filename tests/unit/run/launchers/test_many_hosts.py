"""Jobs on several hosts that are all this one: the agents are local commands, the ranks are real."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from pyhvd.job.agent.host_facts import describe_network
from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import OPENMPI
from tests.many_hosts import LOCAL, Launcher, end_of, local_agent
from tests.waiting import state_of, wait_gone, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")


@pytest.fixture(scope="module", autouse=True)
def family() -> str:
    try:
        return find_library().family
    except LaunchError as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def agent(family: str) -> str:
    return local_agent(family)


@pytest.fixture
def launcher(tmp_path: Path, agent: str) -> Launcher:
    return Launcher(tmp_path, agent)


def test_ranks_are_numbered_host_by_host(launcher: Launcher) -> None:
    program = """
        import os, sys
        numbers = [os.environ["HOROVOD_" + name] for name in (
            "HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
        print(*numbers, *sys.argv, os.getcwd() == sys.path[0], os.environ["ODD"] == "a\\n'b", flush=True)
    """
    ended = launcher.run("-x", "ODD=a\n'b", launcher.script(program), "x", hosts="h1:2,h2:1")
    assert ended.code == 0, ended
    assert sorted(ended.out.splitlines()) == [
        "[0]<stdout>:h1 0 3 0 2 0 2 script.py x True True",
        "[1]<stdout>:h1 1 3 1 2 0 1 script.py x True True",
        "[2]<stdout>:h2 2 3 0 1 1 2 script.py x True True",
    ]
    assert ended.err == ""


def test_an_allreduce_over_all_ranks(launcher: Launcher) -> None:
    program = """
        import numpy as np, pyhvd as hvd
        hvd.init()
        print(hvd.rank(), hvd.cross_size(), hvd.allreduce(np.ones(3), op=hvd.Sum).tolist())
    """
    ended = launcher.run(launcher.script(program))
    assert ended.code == 0, ended
    expected = [f"[{rank}]<stdout>:{rank} 2 [4.0, 4.0, 4.0]" for rank in range(4)]
    assert sorted(ended.out.splitlines()) == expected


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise LookupError('not here')", 1, "LookupError: not here"),
        ("sys.exit(3)", 3, r"rank 2 of 4 on host {host} (pid {pid}) called sys.exit(3)"),
        ("os._exit(4)", 4, r"rank 2 of 4 on host {host} (pid {pid}) exited with code 4, without a Python"),
        ("os.kill(os.getpid(), 9)", 137, "rank 2 of 4 on host {host} (pid {pid}) was killed by SIGKILL"),
        (
            "__import__('mpi4py.MPI').MPI.COMM_WORLD.Abort(9)",
            9,
            "rank 2 of 4 on host h2 called MPI_Abort with code 9",
        ),
    ],
)
def test_the_cause_is_the_last_on_the_screen(
    launcher: Launcher, family: str, how: str, code: int, text: str
) -> None:
    program = f"""
        import os, sys, time
        if os.environ["HOROVOD_RANK"] == "2":
            open("pid", "w").write(str(os.getpid()))
            {how}
        if "Abort" in {how!r}:
            from mpi4py import MPI
        time.sleep(1000)
    """
    ended = launcher.run(launcher.script(program))
    assert ended.code == code, ended
    pid = (launcher.folder / "pid").read_text()
    host = "h2" if family == OPENMPI else os.uname().nodename
    assert text.replace("{host}", host).replace("{pid}", pid) in ended.last, ended


def test_a_failed_rank_may_run_its_exit_handlers(launcher: Launcher) -> None:
    program = """
        import atexit, os, time
        if os.environ["HOROVOD_RANK"] == "0":
            atexit.register(lambda: (time.sleep(0.1), open("handled", "w").close()))
            raise RuntimeError("now")
        time.sleep(1000)
    """
    assert launcher.run(launcher.script(program)).code == 1
    assert (launcher.folder / "handled").exists()


@pytest.mark.any_mpi
def test_a_crash_names_the_line_or_quotes_mpi(launcher: Launcher, family: str) -> None:
    program = """
        import ctypes, resource
        from mpi4py import MPI
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if MPI.COMM_WORLD.rank == 2:
            (ctypes.c_char * 1).from_address(1 << 40)[0]
        MPI.COMM_WORLD.Barrier()
    """
    ended = launcher.run(launcher.script(program))
    assert ended.code == 139, ended
    where = "in <module>: (ctypes.c_char * 1).from_address(1 << 40)[0]"
    quoted = "; Signal: Segmentation fault (11); Failing at address: 0x10000000000"
    assert ended.last.endswith(quoted if family == OPENMPI else where), ended


@pytest.mark.any_mpi
def test_a_host_whose_clock_is_an_hour_ahead(launcher: Launcher, agent: str) -> None:
    """A crash may follow from another one, so the earliest is the cause."""
    ahead = launcher.folder / "ahead"
    ahead.mkdir()
    (ahead / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 3600\n"
    )
    agent = f"sh -c 'if [ {{host}} = h2 ]; then export PYTHONPATH={ahead}; fi; exec \"$@\"' sh {agent}"
    program = """
        import os, resource, signal, time
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        rank = os.environ["HOROVOD_RANK"]
        assert time.time() - os.stat(__file__).st_mtime > 3000 or rank < "2"
        open("up." + rank, "w").close()
        while len([name for name in os.listdir() if name.startswith("up.")]) < 4:
            time.sleep(0.01)
        time.sleep({"2": 0.0, "0": 0.3}.get(rank, 1000))
        os.kill(os.getpid(), signal.SIGSEGV)
    """
    ended = launcher.run(launcher.script(program), agent=agent)
    assert ended.code == 139, ended
    assert ended.last.startswith("pyhvd: rank 2 of 4"), ended


@pytest.mark.any_mpi
def test_all_hosts_problems_are_told_at_once_and_nothing_runs(launcher: Launcher) -> None:
    agent = (
        "sh -c 'case {host} in"
        " h1) {command};;"
        " h2) echo Permission denied, please try again. >&2; exit 255;;"
        " h3) echo Welcome; echo No module named pyhvd >&2; exit 1;; esac'"
    )
    program = launcher.script("open('ran', 'w').close()")
    ended = launcher.run(program, hosts="h1:1,h2:1,h3:1", agent=agent)
    assert ended.code == 1
    assert [line.split(": ")[1] for line in ended.err.splitlines()] == ["host h2", "host h3"], ended
    assert "ssh-copy-id" in ended.err
    assert not (launcher.folder / "ran").exists()


@pytest.mark.any_mpi
def test_a_host_that_comes_up_late(launcher: Launcher) -> None:
    agent = (
        "sh -c ': {host}; if [ -e up ]; then {command}; fi; touch up;"
        " echo ssh: connect to host h1 port 22: Connection refused >&2; exit 255'"
    )
    ended = launcher.run("-c", "print('here')", hosts="h1:1", agent=agent)
    assert (ended.code, ended.out) == (0, "[0]<stdout>:here\n"), ended


@pytest.mark.any_mpi
def test_a_host_that_does_not_come_up(launcher: Launcher) -> None:
    agent = "sh -c 'echo ssh: connect to host {host} port 22: Connection refused >&2; exit 255; {command}'"
    ended = launcher.run("--start-timeout", "2", "-c", "pass", agent=agent)
    assert ended.code == 1
    assert [line.split(": ")[1] for line in ended.err.splitlines()] == ["host h1", "host h2"], ended
    assert "Connection refused. Is the host up" in ended.err


@pytest.mark.any_mpi
def test_a_login_shell_that_prints(launcher: Launcher) -> None:
    agent = "sh -c ': {host}; yes Welcome | head -c 10000; {command}'"
    ended = launcher.run("-c", "print('here')", hosts="h1:1", agent=agent)
    assert (ended.code, ended.out) == (0, "[0]<stdout>:here\n"), ended


def test_a_login_shell_that_prints_forever(launcher: Launcher) -> None:
    ended = launcher.run("-c", "pass", hosts="h1:1", agent="sh -c 'exec yes Welcome; {host}; {command}'")
    assert ended.code == 1
    assert "instead of the agent's first; they begin: 'Welcome" in ended.last, ended


@pytest.mark.any_mpi
def test_a_login_shell_that_exits_at_once(launcher: Launcher) -> None:
    ended = launcher.run("-c", "pass", hosts="h1:1", agent="sh -c 'exit 0; {host}; {command}'")
    expected = "pyhvd: host h1: the agent did not start: exit code 0, and no word"
    assert (ended.code, ended.err.splitlines()) == (1, [expected])


def test_hosts_of_one_name(launcher: Launcher, family: str) -> None:
    ended = launcher.run("-c", "print('here')", agent=LOCAL)
    if family != OPENMPI:
        assert (ended.code, ended.out.count("here")) == (0, 4), ended
        return
    assert ended.code == 1
    assert "several hosts have the name" in ended.last, ended
    assert "give each host its own name" in ended.last


def test_arguments_for_mpiexec(launcher: Launcher, family: str) -> None:
    program = launcher.script("import os; print(os.environ['HOROVOD_HOSTNAME'])")
    ended = launcher.run("--binding-args", "--bind-to core", program)
    assert (ended.code, ended.out) == (2, ""), ended
    assert "--binding-args have no effect on many hosts" in ended.last
    ended = launcher.run("--mpi-args", "--map-by node", program)
    if family == OPENMPI:
        expected = [f"[{rank}]<stdout>:{host}" for rank, host in enumerate(["h1", "h2"] * 2)]
        assert (ended.code, sorted(ended.out.splitlines())) == (0, expected), ended
        ended = launcher.run("--mpi-args", "--nonesuch", program)
        assert "mpiexec exited with code" in ended.err, ended
    assert (ended.code, ended.out) == (1, ""), ended


@pytest.mark.parametrize(
    "take_part",
    ["from mpi4py import MPI", "import mpi4py, pyhvd; mpi4py.rc.initialize = False; pyhvd.init()"],
    ids=["import", "init()"],
)
def test_a_rank_that_takes_no_part_in_mpi(take_part: str, launcher: Launcher) -> None:
    program = f"""
        import os, time
        if os.environ["HOROVOD_RANK"] != "2":
            {take_part}
    """
    # Of one host MPICH's ranks wait in shared memory, of which no server hears.
    for hosts in ("h1:2,h2:2", "h1:3"):
        ended = launcher.run(launcher.script(program), hosts=hosts)
        assert ended.code == 1, ended
        name = "h2" if "h2" in hosts else "h1"
        assert re.fullmatch(
            rf"pyhvd: rank 2 of [34] on host {name} ended without calling init\(\), and ranks? [-, 013]+"
            r" waits? for it there: every rank must call pyhvd.init\(\), or none",
            ended.last,
        ), ended


def test_a_rank_that_is_late_in_init(launcher: Launcher) -> None:
    program = """
        import os, time
        if os.environ["HOROVOD_RANK"] == "1":
            time.sleep(100)
        from mpi4py import MPI
    """
    ended = launcher.run("--start-timeout", "3", launcher.script(program), hosts="h1:2")
    assert ended.code == 1, ended
    assert ended.last == (
        "pyhvd: rank 1 of 2 on host h1 has not called init() within the start timeout of 3 s, and rank 0"
        " waits for it there"
    )


def test_one_host_by_pmi(launcher: Launcher, family: str) -> None:
    ended = launcher.run("--launcher", "pmi", "-c", "print('here')", hosts="localhost:2", agent=LOCAL)
    if family == OPENMPI:
        assert (ended.code, ended.out) == (1, ""), ended
        assert "--launcher pmi is for MPICH and Intel MPI" in ended.last
    else:
        assert (ended.code, ended.out.count("here")) == (0, 2), ended


@pytest.mark.any_mpi
def test_a_directory_and_a_script_that_are_not_there(launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.run("--chdir", "nowhere", "-c", "pass")
    assert ended.code == 1
    assert [line.split(": ")[1] for line in ended.err.splitlines()] == ["host h1", "host h2"], ended
    assert "there is no directory" in ended.err
    ended = launcher.run("gone.py")
    assert (ended.code, ended.err.count("gone.py")) == (1, 1), ended


def test_ctrl_c_reaches_every_rank_once(launcher: Launcher) -> None:
    program = """
        import os, time
        rank = os.environ["HOROVOD_RANK"]
        try:
            print("up", flush=True)
            time.sleep(1000)
        except KeyboardInterrupt:
            open("interrupted." + rank, "x").close()
            raise
    """
    job = launcher.start(launcher.script(program))
    assert job.stdout is not None
    for _ in range(4):
        assert job.stdout.readline().endswith("up\n")
    begin = time.monotonic()
    job.send_signal(signal.SIGINT)
    ended = end_of(job)
    assert time.monotonic() - begin < 5
    assert ended.code == 130, ended
    assert ended.last == "pyhvd: ended by SIGINT"
    assert "KeyboardInterrupt" in ended.err
    assert sorted(path.name for path in launcher.folder.glob("interrupted.*")) == [
        f"interrupted.{rank}" for rank in range(4)
    ]


@pytest.mark.any_mpi
def test_an_agent_that_never_answers(launcher: Launcher) -> None:
    agent = "sh -c 'touch begun.{host}; exec sleep 1000; {command}'"
    ended = launcher.run("--start-timeout", "1", "-c", "pass", agent=agent)
    assert ended.code == 1
    text = "its agent has not started within 1 s (--start-timeout)"
    assert ended.err.splitlines() == [f"pyhvd: host h1: {text}", f"pyhvd: host h2: {text}"]


def test_ctrl_c_while_the_agents_start(launcher: Launcher) -> None:
    job = launcher.start("-c", "pass", agent="sh -c 'touch begun.{host}; exec sleep 1000; {command}'")
    wait_until(lambda: len(list(launcher.folder.glob("begun.*"))) == 2)
    begin = time.monotonic()
    job.send_signal(signal.SIGINT)
    ended = end_of(job)
    assert (ended.code, ended.err) == (130, "pyhvd: ended by SIGINT\n")
    assert time.monotonic() - begin < 5


def test_nothing_outlives_a_launcher_that_is_killed(launcher: Launcher) -> None:
    program = """
        import os, time
        open("pid." + os.environ["HOROVOD_RANK"], "w").write(str(os.getpid()))
        print("up", flush=True)
        time.sleep(1000)
    """
    job = launcher.start(launcher.script(program))
    assert job.stdout is not None
    for _ in range(4):
        assert job.stdout.readline().endswith("up\n")
    job.kill()
    end_of(job)
    pids = [int(path.read_text()) for path in launcher.folder.glob("pid.*")]
    wait_gone(pids, 10)


@pytest.mark.any_mpi
def test_files_of_the_ranks(launcher: Launcher, tmp_path: Path) -> None:
    program = """
        import os, sys
        os.write(1, b"one\\xff" + os.environ["HOROVOD_RANK"].encode())
        print("two", file=sys.stderr)
    """
    ended = launcher.run("--output-filename", "out", launcher.script(program))
    assert ended.code == 0, ended
    for rank in range(4):
        assert (tmp_path / f"out/rank.{rank}/stdout").read_bytes() == b"one\xff%d" % rank
        assert (tmp_path / f"out/rank.{rank}/stderr").read_text() == "two\n"
    assert "[3]<stderr>:two" in ended.err
    (tmp_path / "closed").touch()
    ended = launcher.run("--output-filename", "closed", "-c", "pass")
    assert ended.code == 1
    assert "cannot write the files of --output-filename" in ended.last


@pytest.mark.any_mpi
def test_the_commands_are_shown_when_asked_for_and_have_no_secret(launcher: Launcher, family: str) -> None:
    program = """
        import os, sys
        line = [each for each in open("/proc/self/environ").read().split("\\0")]
        print(any("KEY" in each and "PYHVD" in each for each in line))
    """
    ended = launcher.run("--verbose", launcher.script(program), "argument", hosts="h1:1", agent=LOCAL)
    assert (ended.code, ended.out) == (0, "[0]<stdout>:False\n"), ended
    agent = (
        f"pyhvd: h1: env PYHVD_HOST_SALT=h1 sh -c 'exec {sys.executable} -P -m pyhvd.job.agent.host_agent'"
    )
    begin = [agent, f"pyhvd: mpi4py is built on {find_library().name}"]
    lines = ended.err.splitlines()
    assert lines[:2] == begin
    if family == OPENMPI:
        assert re.match(
            r"pyhvd: OMPI_MCA_btl=\S+ .* \S+/mpiexec .* --host h\S+:1 .* -n 1 /bin/sh -c", lines[2]
        )
    assert len(lines) == (3 if family == OPENMPI else 2)


# The kernel takes a quarter of the stack's limit, and at most 6 MiB.
_WITH_ROOM = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, resource.getrlimit(resource.RLIMIT_STACK)[1]))
big = {f"BIG_{number}": "\\udcff\\n'$(id)\\"" * 7_500 for number in range(84)}
os.execve(sys.argv[1], sys.argv[1:], os.environ | big | {"ODD": ""})
"""


@pytest.mark.any_mpi
@pytest.mark.parametrize("stack", ["65536", "8192"])
def test_an_environment_of_5_mb_with_odd_bytes(
    launcher: Launcher, tmp_path: Path, agent: str, family: str, stack: str
) -> None:
    """It arrives bit by bit, or the error says that it is too large for the hosts."""
    own = f"env -i HOME=/ PATH={os.environ['PATH']} sh -c 'ulimit -S -s {stack}; exec \"$@\"' sh {agent}"
    program = """
        import os
        values = {value for name, value in os.environb.items() if name.startswith(b"BIG_")}
        print(sum(map(len, os.environb.values())) > 5_000_000, os.environb[b"ODD"], len(values),
              values == {b"\\xff\\n'$(id)\\"" * 7_500})
    """
    big = Launcher(tmp_path, own, place=lambda command: [sys.executable, "-c", _WITH_ROOM, *command])
    ended = big.run(launcher.script(program))
    if stack == "8192":
        assert (ended.code, ended.out) == (1, ""), ended
        assert "could not be started: [Errno 7] Argument list too long" in ended.last
        assert "Its environment is too large: send less of it (--no-env)" in ended.last
    else:
        assert sorted(ended.out.splitlines()) == [f"[{rank}]<stdout>:True b'' 1 True" for rank in range(4)]


_COUNT = """
    import hashlib, os, sys
    print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:8], os.environ["HOROVOD_RANK"])
"""


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_rank_0_gets_the_launchers_stdin_and_its_end(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    data = os.urandom(1 << 20)  # more than the credit
    script = launcher.script(_COUNT)
    if kind == "file":
        (tmp_path / "data").write_bytes(data)
        with open(tmp_path / "data", "rb") as file:
            ended = launcher.run(script, stdin=file.fileno())
    else:
        reader, writer = os.pipe()
        job = launcher.start(script, stdin=reader)
        os.close(reader)
        with open(writer, "wb") as pipe:
            pipe.write(data)
        ended = end_of(job)
    assert ended.code == 0, ended
    empty = hashlib.sha256(b"").hexdigest()[:8]
    digests = [hashlib.sha256(data).hexdigest()[:8], empty, empty, empty]
    lines = [f"[{rank}]<stdout>:{digest} {rank}" for rank, digest in enumerate(digests)]
    assert sorted(ended.out.splitlines()) == lines


@pytest.mark.any_mpi
def test_a_rank_that_does_not_read_its_stdin(launcher: Launcher) -> None:
    with open("/dev/zero", "rb") as zero:
        ended = launcher.run("-c", "import time; time.sleep(1)", stdin=zero.fileno())
        assert ended.code == 0, ended
        ended = launcher.run("-c", "import os, time; os.close(0); time.sleep(1)", stdin=zero.fileno())
        assert ended.code == 0, ended


@pytest.mark.any_mpi
def test_the_doctor_looks_at_hosts_and_says_why_it_cannot(agent: str) -> None:
    doctor = [sys.executable, "-m", "pyhvd", "doctor", "--json", "--timeout", "40"]
    command = [*doctor, "-H", "h1,h2", "--launch-agent", agent]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report = msgspec.json.decode(ended.stdout)
    assert [rank["rank"] for rank in report["trial"]["found"]["ranks"]] == [0, 1]
    assert len(report["trial"]["found"]["links"]) == 1
    assert len(report["hosts"]) == 2
    silent = "sh -c 'echo {host}: Permission denied >&2; exit 255; {command}'"
    ended = subprocess.run(
        [*doctor, "-H", "h1,h2", "--launch-agent", silent], stdout=subprocess.PIPE, check=False
    )
    assert ended.returncode == 1
    error = msgspec.json.decode(ended.stdout)["trial"]["error"]
    assert "host h1: h1: Permission denied" in error
    assert "host h2: h2: Permission denied" in error


def test_a_dry_run_shows_the_commands_and_starts_nothing(launcher: Launcher) -> None:
    ended = launcher.run("--dry-run", "-c", "open('ran', 'w')", agent="touch {host} {command}")
    assert ended.code == 0
    assert [line.split(": ")[1] for line in ended.err.splitlines()] == ["h1", "h2"]
    assert list(launcher.folder.iterdir()) == []


@pytest.mark.any_mpi
def test_the_output_of_some_ranks(launcher: Launcher) -> None:
    ended = launcher.run("--ranks", "1,3", "-c", "import os; print(os.environ['HOROVOD_RANK'])")
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == ["[1]<stdout>:1", "[3]<stdout>:3"]


_TICKS = """
    import os, time
    while not os.path.exists("go"):
        with open("tick." + os.environ["HOROVOD_RANK"], "a") as file:
            file.write(".")
        time.sleep(0.01)
"""


def test_ctrl_z_stops_the_ranks_and_fg_lets_them_go_on(launcher: Launcher) -> None:
    job = launcher.start(launcher.script(_TICKS), hosts="h1:1,h2:1")
    ticks = [launcher.folder / f"tick.{rank}" for rank in range(2)]

    def sizes() -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in ticks]

    def still() -> bool:
        before = sizes()
        time.sleep(1.0)
        return sizes() == before

    try:
        wait_until(lambda: all(sizes()))
        job.send_signal(signal.SIGTSTP)
        wait_until(lambda: state_of(job.pid) == "T")
        wait_until(still)  # on a busy machine the agents stop the ranks a little later
        stopped = sizes()
        job.send_signal(signal.SIGCONT)
        wait_until(lambda: all(now > before for now, before in zip(sizes(), stopped, strict=True)))
        (launcher.folder / "go").touch()
        assert end_of(job).code == 0
    finally:
        job.kill()


def test_ranks_get_their_hosts_interface(launcher: Launcher) -> None:
    program = launcher.script("import os; print(os.environ.get('FI_TCP_IFACE'))")
    for name in {each.name for each in describe_network().interfaces}:
        # Without a wish, hosts that share one network need no choice.
        wish = () if name == "lo" else ("--network-interfaces", name)
        ended = launcher.run(*wish, program)
        assert ended.code == 0, ended
        expected = None if name == "lo" else name
        assert sorted(ended.out.splitlines()) == [f"[{rank}]<stdout>:{expected}" for rank in range(4)]
    ended = launcher.run("--network-interfaces", "h2=nosuch0", program)
    assert ended.code == 1, ended
    assert ended.last.startswith("pyhvd: host h2: no interface nosuch0 is up there; it has ")


@pytest.mark.any_mpi
def test_an_agent_that_is_lost_during_the_probe_is_started_again(launcher: Launcher, agent: str) -> None:
    names = {each.name for each in describe_network().interfaces} - {"lo"}
    if not names:
        pytest.skip("no interface but loopback")
    broken = launcher.folder / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        f"""
import os, sys
h2 = "h2" in (os.uname().nodename, os.environ.get("PYHVD_HOST_SALT"))
if h2 and "pyhvd.job.agent.host_agent" in sys.orig_argv and not os.path.exists({str(broken / "once")!r}):
    from pyhvd.job.agent.prober import Prober
    def dial(self, wanted):
        open({str(broken / "once")!r}, "x").close()
        os.write(2, b"ssh: connect to host h2 port 22: Connection refused\\n")
        os._exit(255)
    Prober.dial = dial
"""
    )
    agent = f"env PYTHONPATH={broken} {agent}"
    ended = launcher.run("--network-interfaces", names.pop(), "-c", "print('here')", agent=agent)
    assert ended.code == 0, ended
    assert len(ended.out.splitlines()) == 4
    assert (broken / "once").exists()
