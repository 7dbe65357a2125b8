"""What elastic programs may do with their files and their stdin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.jobs import ROOT

pytestmark = pytest.mark.timeout(60)

_BEGIN = "import os, signal, sys\nimport pyhvd as hvd\nhvd.init()\nfirst = not hvd.elastic.generation()\n"
_DIE = "if first:\n    os.kill(os.getpid(), signal.SIGKILL)\n"


def run(
    folder: Path, text: str, given: str = "", name: str = "train.py", ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(_BEGIN + text)
    size = str(ranks)
    return subprocess.run(
        [sys.executable, "-m", "pyhvd.run", "-n", size, "--min-np", size, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=given,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_later_generations_find_the_end_of_stdin(tmp_path: Path) -> None:
    ended = run(tmp_path, f"print(repr(sys.stdin.read()), flush=True)\n{_DIE}", "text")
    assert (ended.returncode, ended.stdout.split()) == (0, ["[0]<stdout>:'text'", "[0]<stdout>:''"]), ended


def test_the_script_may_change_while_it_runs(tmp_path: Path) -> None:
    ended = run(tmp_path, f"if first:\n    open('train.py', 'a').write('# more')\n{_DIE}print('done')\n")
    assert (ended.returncode, ended.stdout.split()) == (0, ["[0]<stdout>:done"]), ended


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    ended = run(tmp_path, "", name="nothere.py")
    assert ended.returncode == 1, ended
    assert "can't open file" in ended.stderr.splitlines()[-1], ended
    assert "Traceback" not in ended.stderr, ended


@pytest.mark.parametrize("how", ["return", "sys.exit(0)"])
def test_a_rank_that_returns_before_the_others_is_named_at_once(how: str, tmp_path: Path) -> None:
    """The next generation would do the same: none is started."""
    ended = run(
        tmp_path,
        f"""
state = hvd.elastic.ObjectState(step=0)
@hvd.elastic.run
def train(state):
    while state.step < 20:
        if state.step == 3 and hvd.rank() == 1:
            {how}
        hvd.allreduce(1.0, name="x")
        state.step += 1
        state.commit()
train(state)
""",
        ranks=3,
    )
    assert ended.returncode == 1, ended
    assert "generation 1" not in ended.stderr, ended
    assert ended.stderr.splitlines()[-1] == (
        "pyhvd.errors.ShutDownError: pyhvd has been shut down: rank 1 has ended, while this rank went on: all"
        " ranks must return from the program together, after equally many steps"
    )


def test_a_rank_that_ends_before_the_others_without_an_elastic_function(tmp_path: Path) -> None:
    """A program that only starts under ``--min-np`` has no state: it would do the same again."""
    ended = run(
        tmp_path,
        """
for step in range(20):
    if step == 3 and hvd.rank() == 1:
        sys.exit(0)
    hvd.allreduce(1.0, name="x")
""",
        ranks=3,
    )
    assert ended.returncode == 1, ended
    assert "generation 1" not in ended.stderr, ended
    assert ended.stderr.splitlines()[-1].startswith("pyhvd.errors.ShutDownError"), ended
    assert ended.stderr.splitlines()[-1].endswith("pyhvd has been shut down: rank 1 has ended"), ended
