"""A process that does imports and forks: what it imports, and what its children get."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyhvd.job.agent.elastic_host import Zygote
from pyhvd.job.agent.rank_process import Program
from pyhvd.job.agent.zygote import imports_of
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")

ROOT = Path(__file__).resolve().parents[4]
PROBE = "tests.unit.job.agent.forked_probe"


def test_installed_modules_at_the_top_are_found(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise AssertionError")
    (tmp_path / "train.py").write_text(
        "import json, own\nfrom fractions import Fraction\nimport mpi4py.MPI\nimport missing\n"
        "if True:\n    import decimal\ndef f():\n    import csv\nimport json\nfrom . import x\n"
    )
    assert imports_of(["train.py", "--flag"], str(tmp_path)) == ["json", "fractions"]
    assert imports_of(["-c", "import json"], str(tmp_path)) == ["json"]
    assert imports_of(["-m", "json.tool"], str(tmp_path))[:2] == ["argparse", "json"]


def test_an_environment_in_the_working_directory_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / ".venv" / "packages"
    packages.mkdir(parents=True)
    for path in (packages / "installed_here.py", tmp_path / "own.py"):
        path.write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages), str(tmp_path)])
    monkeypatch.setattr(
        "sysconfig.get_path", lambda name: str(packages if name == "purelib" else tmp_path / name)
    )
    assert imports_of(["-c", "import installed_here, own"], str(tmp_path)) == ["installed_here"]


def test_the_package_of_a_module_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "own_package" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "own_package" / "__init__.py").write_text("raise AssertionError")
    (inner / "train.py").write_text("import json")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imports_of(["-m", "own_package.inner.train"], str(tmp_path)) == ["json"]


@pytest.mark.parametrize("program", [["missing.py"], ["broken.py"], ["-m", "missing"], ["-c", "import ("]])
def test_a_program_that_cannot_be_read_imports_nothing(program: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    assert imports_of(program, str(tmp_path)) == []


def make(folder: Path, code: str, path: str = "", preload: str = "") -> Zygote:
    program = Program("", ["-c", code], str(folder), [], [preload] if preload else [])
    paths = os.pathsep.join(filter(None, [str(ROOT), path]))
    return Zygote(program, {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    made = make(tmp_path, "import json", preload="fractions")
    yield made
    made.close()


def test_a_fork_is_as_a_command(zygote: Zygote, tmp_path: Path) -> None:
    wait_until(lambda: zygote.fit)
    (stdin, feed), (out, stdout), (err, stderr) = (os.pipe() for _ in range(3))
    (life, own_life), (found, control) = socket.socketpair(), socket.socketpair()
    given = own_life.fileno(), control.fileno()
    os.write(feed, b"given")
    os.close(feed)
    process = zygote.popen(
        [sys.executable, "-P", "-m", "pyhvd.job.process.guardian", *map(str, given), PROBE],
        env={"ONLY": "this"},
        cwd=str(tmp_path),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=given,
        start_new_session=True,
    )
    for each in (stdin, stdout, stderr):
        os.close(each)
    own_life.close()
    control.close()
    process.wait(10)
    assert life.recv(99).endswith(b"\n3\n")
    assert (os.read(out, 99), os.read(err, 99)) == (b"to stdout\n", b"to stderr\n")
    assert json.loads(found.recv(9999)) == {
        "directory": str(tmp_path),
        "variables": {"ONLY": "this"},
        "in_own_session": True,
        "imported": True,
        "stdin": "given",
    }


_POOLS = """
import os
from pyhvd.job.agent.zygote import preload
assert preload(["numpy", "numpy.linalg"]) == ""
import numpy as np
for _ in range(20):  # after each product the pool's threads run
    product = np.ones((300, 300)) @ np.ones((300, 300))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if (np.ones((300, 300)) @ np.ones((300, 300)) == product).all() else 1)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.timeout(60)
def test_openblas_stops_its_threads_at_a_fork() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", _POOLS], env=env, cwd=ROOT, check=True, timeout=50)


def test_without_its_zygote_a_process_is_started_by_a_command(zygote: Zygote, tmp_path: Path) -> None:
    wait_until(lambda: zygote.fit)
    zygote._process.kill()
    zygote._process.wait()
    out, stdout = os.pipe()
    process = zygote.popen(
        [sys.executable, "-m", "json.tool", "--help"],
        env=dict(os.environ),
        cwd=str(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stdout,
        pass_fds=(),
        start_new_session=True,
    )
    os.close(stdout)
    assert process.wait(10) == 0
    with open(out, "rb") as file:
        assert b"usage" in file.read()
    assert not zygote.fit


_FAKE_TORCH = "SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))"


@pytest.mark.parametrize(
    ("code", "does"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "starts threads",
        ),
        ("import sys; sys.modules['mpi4py.MPI'] = sys", "initialises MPI"),
        (f"import sys; from types import *; sys.modules['torch'] = {_FAKE_TORCH}", "initialises CUDA"),
    ],
)
def test_a_module_that_makes_forks_unsafe_is_named(
    code: str, does: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "unsafe.py").write_text(code)
    made = make(tmp_path / "elsewhere", "import unsafe", str(packages))
    (tmp_path / "elsewhere").mkdir()
    until = time.monotonic() + 30
    text = ""
    while not text and time.monotonic() < until:
        assert not made.fit
        text = capfd.readouterr().err
    made.close()
    assert text == f"pyhvd: ranks start slowly: unsafe {does} when it is imported\n"


_SEEDED = """
import os, random, sys, types
import numpy as np
from pyhvd.job.agent.zygote import reseed

seeds = []
sys.modules["torch"] = types.SimpleNamespace(seed=lambda: seeds.append(os.getpid()))
random.seed(1)
np.random.seed(1)
before = random.getstate(), np.random.get_state()[1].tolist()
reseed()
after = random.getstate(), np.random.get_state()[1].tolist()
assert before[0] != after[0] and before[1] != after[1] and seeds == [os.getpid()]
"""


def test_all_generators_are_seeded_anew() -> None:
    subprocess.run([sys.executable, "-c", _SEEDED], cwd=ROOT, check=True, timeout=50)
