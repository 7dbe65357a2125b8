"""Jobs on hosts at the limits of what is around them: connections, output, its readers, disks, many jobs.

With --long there is 1 GB of output, and there are 100 jobs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.hosts import sshd
from tests.hosts.sshd import Site, read
from tests.many_hosts import Launcher, end_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.any_mpi]

_HOSTS = "east:2,west:2"
_MEMORY = 100 << 20
# Longer than the beats of hosts may be missed.
_STANDS_STILL_S = 6.5
_LINE = 100
_LINES_PER_MB = (1 << 20) // _LINE // 4
# Each line has its rank and its number. Most writes end inside a line.
_TALK = """
    import os, sys, time
    rank = int(os.environ["HOROVOD_RANK"])
    print("up", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    out = sys.stdout.buffer
    for number in range({lines}):
        out.write(b"%d %d " % (rank, number) + b"x" * ({width} - len(b"%d %d \\n" % (rank, number))) + b"\\n")
    out.flush()
    open("ended.%d" % rank, "w").close()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from sshd.east_and_west(tmp_path_factory)


@pytest.fixture
def launcher(site: Site, tmp_path: Path) -> Iterator[Launcher]:
    yield site.launcher(tmp_path)
    assert site.wait_until_gone(5.0) == []


def start_talking(launcher: Launcher, megabytes: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a job whose ranks together write so much, when the file `go` exists; return when all are up."""
    program = _TALK.replace("{lines}", str(megabytes * _LINES_PER_MB)).replace("{width}", str(_LINE))
    job = launcher.start(*arguments, launcher.script(program), hosts=_HOSTS)
    assert job.stdout is not None
    for _ in range(4):
        assert job.stdout.readline().endswith("up\n")
    return job


def check_lines(job: subprocess.Popen[str], megabytes: int) -> None:
    """Read all lines of :func:`start_talking`: none is lost, changed or mixed with another."""
    assert job.stdout is not None
    numbers = [0] * 4
    for line in job.stdout:
        rank, number = line[1:].split("]", 1)[0], line.split(":", 1)[1].split(" ", 2)[1]
        assert line.startswith(f"[{rank}]<stdout>:{rank} {numbers[int(rank)]} x"), line
        assert len(line) == len("[0]<stdout>:") + _LINE, line
        assert int(number) == numbers[int(rank)]
        numbers[int(rank)] += 1
    assert numbers == [megabytes * _LINES_PER_MB] * 4


def test_much_output_whose_reader_first_stands_still(
    request: pytest.FixtureRequest, launcher: Launcher
) -> None:
    """The ranks wait, and beats go on, so that no host is lost; the launcher stays small."""
    megabytes = 1000 if request.config.getoption("--long") else 50
    job = start_talking(launcher, megabytes)
    (launcher.folder / "go").touch()
    time.sleep(_STANDS_STILL_S)
    assert job.poll() is None
    assert list(launcher.folder.glob("ended.*")) == []
    memory = memory_of(job.pid)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(check_lines, job, megabytes)
        while not reading.done():
            memory = max(memory, memory_of(job.pid))
            time.sleep(0.05)
        reading.result()
    ended = end_of(job)
    assert (ended.code, ended.err) == (0, "")
    assert 0 < memory < _MEMORY


def memory_of(process: int) -> int:
    """Return the memory of a process now, in bytes."""
    sizes = [line.split()[1] for line in read(process, "status").splitlines() if line.startswith(b"VmRSS:")]
    return int(sizes[0]) << 10 if sizes else 0


def test_a_reader_that_goes_away(launcher: Launcher) -> None:
    job = start_talking(launcher, 20)
    assert job.stdout is not None
    assert job.stderr is not None
    job.stdout.close()
    (launcher.folder / "go").touch()
    told = job.stderr.read().splitlines()
    assert (job.wait(60), len(list(launcher.folder.glob("ended.*")))) == (0, 4), told
    assert len(told) == 1, told
    assert "the ranks' stdout is no longer shown: BrokenPipeError" in told[0]


def test_disks_that_are_full(site: Site, launcher: Launcher) -> None:
    """Those of --output-filename, and of the launcher's own stdout."""
    full = launcher.folder / "full"
    full.mkdir()
    site.bed.head.do("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full))
    inside = ["env", f"--chdir={launcher.folder}", "sh", "-c", 'exec "$@" > /dev/full', "sh"]
    (launcher.folder / "go").touch()
    writer = Launcher(
        launcher.folder, None, site.sshd.variables, lambda command: site.bed.head.command([*inside, *command])
    )
    program = _TALK.replace("{lines}", "5000").replace("{width}", "100")
    ended = writer.run("--output-filename", "full", writer.script(program), hosts=_HOSTS)
    assert (ended.code, len(list(launcher.folder.glob("ended.*")))) == (0, 4), ended
    told = sorted(line.rpartition("pyhvd")[2] for line in ended.err.splitlines())
    assert len(told) == 2, ended
    assert told[0].endswith("stdout gets no more output: No space left on device"), ended
    assert "the ranks' stdout is no longer shown: OSError: [Errno 28] No space left" in told[1], ended


def test_more_agents_than_an_sshd_begins_with(site: Site, launcher: Launcher) -> None:
    """It drops connections beyond its MaxStartups, 10: those agents are started again."""
    east = site.bed.hosts["east"]
    names = [f"many{number}.test" for number in range(11)]
    site.sshd.add_names("many*.test", east)
    program = (
        "import socket, time; s = [socket.create_connection(('east', 22)) for _ in range(9)]; time.sleep(3)"
    )
    holder = subprocess.Popen(site.bed.head.command(["python3", "-c", program]))
    time.sleep(0.5)
    try:
        ended = launcher.run("-c", "print('here')", hosts=",".join(names))
    finally:
        holder.wait()
    assert (ended.code, ended.out.count("here")) == (0, 11), ended
    assert "pyhvd: many0.test and many1.test" in ended.err
    assert b"MaxStartups" in site.sshd.log(east)


def test_many_jobs_at_once(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> None:
    """Each has its own key, output, files and exit code."""
    count = 100 if request.config.getoption("--long") else 8

    def run(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        launcher = site.launcher(folder)
        program = (
            "import os, sys; print(os.environ['NUMBER'], os.getcwd()); sys.exit(int(os.environ['NUMBER']))"
        )
        arguments = ("--output-filename", "out", "-x", f"NUMBER={number}", "-c", program)
        ended = launcher.run("--start-timeout", "60", *arguments, hosts=("east:1", "west:1")[number % 2])
        assert (ended.code, ended.out) == (number, f"[0]<stdout>:{number} {folder}\n"), ended
        assert (folder / "out/rank.0/stdout").read_text() == f"{number} {folder}\n"

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(run, range(count)))
    assert site.wait_until_gone(5.0) == []
