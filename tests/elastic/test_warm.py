"""``--warm init``: the zygote runs the program until ``init()``, and the ranks inherit what it has loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.jobs import ROOT
from tests.many_hosts import LOCAL, Ended, end_of
from tests.waiting import wait_gone, wait_until

pytestmark = pytest.mark.timeout(60)

_TWO_HOSTS = ("-H", "east:2,west:2", "--launch-agent", LOCAL, "--min-np", "2")

# Data is loaded, and init() called, in a module.
_LOADING = """
import os
import numpy as np
import pyhvd as hvd

np.random.seed(1)
with open("loads", "a") as file:
    file.write(os.environ["HOROVOD_HOSTNAME"] + "\\n")
data = np.arange(100.0)
opened = open(f"opened-{os.getpid()}", "w")

def begin():
    hvd.init()
    opened.write("whole")
    opened.flush()
"""

_TRAINING = """
import os, random, signal, sys
import numpy as np
import loading
import pyhvd as hvd

assert not hvd.elastic.enabled() and "HOROVOD_RANK" not in os.environ
random.seed(1)
os.environ["GIVEN"] = "changed"
del os.environ["TAKEN"]
print("loaded", flush=True)
state = hvd.elastic.ObjectState(step=0, sums=np.zeros(100))
loading.begin()
rank, generation = hvd.rank(), hvd.elastic.generation()

def zygote():
    with open(f"/proc/{os.getppid()}/stat") as file:  # of the guardian
        return int(file.read().rpartition(")")[2].split()[1])

@hvd.elastic.run
def train(state):
    while state.step < 9:
        state.sums += hvd.allreduce(loading.data, name="data")
        state.step += 1
        state.commit()
        if state.step == 3 * generation + 2 and rank == generation % hvd.size() and generation < 2:
            end()

def end():
    os.kill(os.getpid(), signal.SIGKILL)
"""

_CHECKED = """
assert (__name__, sys.argv[1:], os.environ["GIVEN"]) == ("__main__", ["--epochs", "3"], "changed")
assert "TAKEN" not in os.environ and int(os.environ["HOROVOD_RANK"]) == rank
assert int(os.environ["PYHVD_ELASTIC_GENERATION"]) == generation
print("numbers", random.random(), np.random.rand(), flush=True)
train(state)
assert (state.sums == 9 * loading.data).all()
assert generation == 2
"""


def start(folder: Path, text: str, *flags: str) -> subprocess.Popen[str]:
    (folder / "loading.py").write_text(_LOADING)
    (folder / "train.py").write_text(text)
    flags = flags or ("-n", "2", "--min-np", "2")
    return subprocess.Popen(
        [sys.executable, "-m", "pyhvd.run", *flags, "--warm", "init", "train.py", "--epochs", "3"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GIVEN": "x", "TAKEN": "x"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, text: str, *flags: str) -> Ended:
    return end_of(start(folder, text, *flags))


def loads(folder: Path) -> list[str]:
    """Return on which hosts data was loaded."""
    return sorted((folder / "loads").read_text().split())


def test_each_host_loads_its_data_once(tmp_path: Path) -> None:
    ended = run(tmp_path, _TRAINING + _CHECKED, *_TWO_HOSTS)
    assert ended.code == 0, ended
    assert loads(tmp_path) == ["east", "west"]
    # The output before init() is shown once on each host, as that of its first rank.
    lines = ended.out.splitlines()
    loaded = sorted(line for line in lines if "loaded" in line)
    assert loaded == ["[0]<stdout>:loaded", "[2]<stdout>:loaded"]
    numbers = [word for line in lines if "numbers" in line for word in line.split()[1:]]
    assert len(set(numbers)) == len(numbers) == 2 * 4 * 3  # each rank of each generation has its own
    assert [path.read_text() for path in tmp_path.glob("opened-*")] == ["whole" * 6] * 2


def test_a_killed_zygote_is_replaced(tmp_path: Path) -> None:
    """The next generation waits for the new one, from which the one after it is forked."""
    kill = "    if generation == 0:\n        os.kill(zygote(), signal.SIGKILL)\n"
    body = _TRAINING.replace("def end():\n", f"def end():\n{kill}")
    ended = run(tmp_path, body + _CHECKED)
    assert ended.code == 0, ended
    assert len(loads(tmp_path)) == 2


def test_a_zygote_that_is_killed_while_it_loads(tmp_path: Path) -> None:
    killed = "if open('loads').read().count('\\n') == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    body = _TRAINING.replace('print("loaded"', f'{killed}print("loaded"')
    ended = run(tmp_path, body + "train(state)\n")
    assert ended.code == 0, ended
    assert len(loads(tmp_path)) == 2
    assert "was not started: the zygote that was to fork it was killed" in ended.err, ended


def test_a_generation_may_end_while_a_host_loads(tmp_path: Path) -> None:
    """The ranks that wait there are never forked, and the host stays in the job."""
    body = """
import os, time
import loading
from pyhvd.api import lifecycle

host = os.environ["HOROVOD_HOSTNAME"]
while host == "west" and not os.path.exists("again"):
    time.sleep(0.02)
print("its output is gone", flush=True)
begin = lifecycle._start

def fail(*args):
    if host == "east" and os.environ["PYHVD_ELASTIC_GENERATION"] == "0":
        os._exit(7)
    open("again", "w").close()
    begin(*args)

lifecycle._start = fail
loading.begin()
assert loading.hvd.elastic.generation() == 1
"""
    ended = run(tmp_path, body, *_TWO_HOSTS)
    assert ended.code == 0, ended
    assert loads(tmp_path) == ["east", "west"]
    (line,) = [line for line in ended.err.splitlines() if "generation" in line]
    assert line.startswith("pyhvd: generation 1: 4 ranks on 2 hosts, from the beginning: "), ended
    assert "exited with code 7" in line, ended


def test_an_interrupt_while_the_program_loads_ends_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, "import loading, time\ntime.sleep(1000)\n")
    try:
        wait_until((tmp_path / "loads").exists)
    finally:
        job.send_signal(signal.SIGINT)
    ended = end_of(job)
    assert (ended.code, ended.err) == (130, "pyhvd: ended by SIGINT\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "starts threads",
        ),
        ("from mpi4py import MPI", "initialises MPI"),
        ("import os; os.environ['HOROVOD_RANK']", "raised KeyError: 'HOROVOD_RANK'"),
    ],
)
def test_ranks_run_the_program_themselves_after_what_forbids_forks(
    text: str, why: str, tmp_path: Path
) -> None:
    end = "import os\nif hvd.rank() == hvd.elastic.generation() == 0:\n    os.kill(os.getpid(), 9)\n"
    ended = run(tmp_path, f"{text}\nimport loading, pyhvd as hvd\nloading.begin()\n{end}")
    assert ended.code == 0, ended
    assert [line for line in ended.err.splitlines() if "--warm init" in line] == [
        f"[0]<stderr>:pyhvd: --warm init has no effect: the program {why} before init()"
    ], ended


def test_mpi_that_is_up_before_init_leaves_no_shared_memory(tmp_path: Path) -> None:
    made = "made = segments_of(os.getpid())\nopen('made', 'a').write(' '.join(made) + ' ')\n"
    begin = f"import os\nfrom mpi4py import MPI\nfrom pyhvd.job.mpi.segments import segments_of\n{made}"
    ended = run(tmp_path, f"{begin}import loading\nloading.begin()\n")
    assert ended.code == 0, ended
    paths = (tmp_path / "made").read_text().split()
    assert paths
    assert not any(map(os.path.exists, paths))


def test_a_program_that_never_calls_init(tmp_path: Path) -> None:
    ended = run(tmp_path, "print('done')")
    assert ended.code == 0, ended
    assert "--warm init has no effect: the program ended before init()" in ended.err
    # The zygote has run it, and then the ranks.
    assert sorted(ended.out.split()) == ["[0]<stdout>:done", "[0]<stdout>:done", "[1]<stdout>:done"]


def test_a_program_may_close_its_stdout_before_init(tmp_path: Path) -> None:
    ended = run(tmp_path, "import loading, sys\nsys.stdout = None\nsys.stderr.close()\nloading.begin()\n")
    assert ended.code == 0, ended
    assert len(loads(tmp_path)) == 1


def test_the_numbers_of_ranks_do_not_come_from_the_program(tmp_path: Path) -> None:
    sets = "".join(f"os.environ['{name}_RANK'] = '0'\n" for name in ("HOROVOD", "PMI"))
    shows = "print(hvd.rank(), os.environ['HOROVOD_RANK'], flush=True)\n"
    ended = run(tmp_path, f"import os\nimport pyhvd as hvd\n{sets}hvd.init()\n{shows}")
    assert ended.code == 0, ended
    assert sorted(ended.out.splitlines()) == ["[0]<stdout>:0 0", "[1]<stdout>:1 1"]


@pytest.mark.parametrize(
    "text",
    ["raise LookupError", "if first:\n    os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["ends", "is killed"],
)
def test_a_zygote_leaves_no_process_of_the_program(text: str, tmp_path: Path) -> None:
    body = """
import os, signal, subprocess

first = not os.path.exists("started")
if first:
    with open("started", "w") as file:
        file.write(str(subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL).pid))
"""
    run(tmp_path, f"{body}{text}\n")
    wait_gone([int((tmp_path / "started").read_text())])


def test_a_child_that_the_program_forks_is_no_zygote(tmp_path: Path) -> None:
    child = "import os, sys\nif not (child := os.fork()):\n    sys.exit(3)\n"
    waits = "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n"
    ended = run(tmp_path, f"{child}{waits}import loading\nloading.begin()\n")
    assert ended.code == 0, ended
    assert "--warm init" not in ended.err
    assert len(loads(tmp_path)) == 1


def test_an_error_before_init_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    ended = run(tmp_path, "import loading\nraise LookupError('no data')\n")
    assert ended.code == 1, ended
    assert "--warm init has no effect: the program raised LookupError: no data before init()" in ended.err
    assert ended.err.count("Traceback") == 1, ended
    assert ended.err.splitlines()[-2:] == ["    raise LookupError('no data')", "LookupError: no data"], ended


def test_an_error_after_init_has_the_programs_traceback(tmp_path: Path) -> None:
    ended = run(tmp_path, "import loading\nloading.begin()\nraise LookupError('no data')\n")
    assert ended.code == 1, ended
    at = ended.err.index("Traceback")
    assert ended.err[at:].splitlines()[1:3] == [
        '  File "train.py", line 3, in <module>',
        "    raise LookupError('no data')",
    ], ended
    assert len(loads(tmp_path)) == 1
