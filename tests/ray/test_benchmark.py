"""The benchmark on Ray runs at a tiny size. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ray.conftest import ROOT

_LIMIT_S = 280.0


@pytest.mark.timeout(_LIMIT_S + 20)
def test_question(cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="the dependency group bench")
    command = [sys.executable, "-m", "benchmarks.questions.ray", "--tiny", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("ray-*.json")
    (run,) = json.loads(path.read_text())["runs"]
    assert any(note.startswith("Ray ") for note in run["notes"])
    *both, restart = run["outcomes"]
    assert [len(outcome["figures"]) for outcome in both] == [2] * 4
    (figures,) = restart["figures"]
    assert figures["min"] > 0
    assert all(len(each["samples"]) == 2 for outcome in run["outcomes"] for each in outcome["figures"])
    wall, cpu, first, later = (outcome["figures"][0]["samples"] for outcome in both)
    assert all(whole > one for whole, one in zip(wall, first, strict=True))
    assert min(*cpu, *later) > 0
