"""Calls and jobs enter no more files than scripts/walk.py says."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_TOOLS = ("gcc", "nm", "addr2line")


def _why_not() -> str:
    if not sys.platform.startswith("linux"):
        return "a preloaded library, as Linux has it"
    if not (Path(sys.prefix) / "bin" / "mpiexec").exists():
        return "no mpiexec beside this Python"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def test_the_table_has_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    walk = importlib.import_module("walk")
    page = (ROOT / "docs" / "internals.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert [name for name, _, _ in rows] == walk.SHOWN
    for name, count, goal in rows:
        assert (int(count), int(goal)) == (walk.BOUNDS[name], walk.GOALS[name])


@pytest.mark.slowest
@pytest.mark.timeout(300)  # the first one builds the extensions
@pytest.mark.skipif(bool(_why_not()), reason=_why_not())
@pytest.mark.parametrize(
    "kind", ["first", "remembered", "spark", "hosts", "restart", "torch_first", "torch_later"]
)
def test_a_call_enters_few_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    walk = importlib.import_module("walk")
    if kind == "spark" and not (ROOT / ".venv-spark" / ".done").exists():
        pytest.skip("no .venv-spark: `make spark` makes it")
    if kind in walk.TORCH and not walk.has_torch():
        pytest.skip("no torch in .venv-spark: `make test-torch` installs it")
    file = tmp_path / "walk.json"
    command = [sys.executable, str(ROOT / "scripts" / "walk.py"), "--only", kind, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(file.read_text())["counts"]
    assert counts
    assert {name: count for name, count in counts.items() if count > walk.BOUNDS[name]} == {}, done.stdout
