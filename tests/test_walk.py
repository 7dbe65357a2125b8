"""An allreduce, and a run inside Spark, enter no more files than scripts/walk.py says."""

from __future__ import annotations

import importlib
import json
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


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first one builds the extensions
@pytest.mark.skipif(bool(_why_not()), reason=_why_not())
@pytest.mark.parametrize("kind", ["first", "remembered", "spark"])
def test_a_call_enters_few_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "spark" and not (ROOT / ".venv-spark" / ".done").exists():
        pytest.skip("no .venv-spark: `make spark` makes it")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bounds = importlib.import_module("walk").BOUNDS
    file = tmp_path / "walk.json"
    command = [sys.executable, str(ROOT / "scripts" / "walk.py"), "--only", kind, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(file.read_text())["counts"]
    assert counts
    assert {name: count for name, count in counts.items() if count > bounds[name]} == {}, done.stdout
