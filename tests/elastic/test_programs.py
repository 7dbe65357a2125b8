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


def run(folder: Path, text: str, given: str = "", name: str = "train.py") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(_BEGIN + text)
    return subprocess.run(
        [sys.executable, "-m", "pyhvd.run", "-n", "1", "--min-np", "1", name],
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
