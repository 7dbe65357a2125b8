"""The runner of the check of the GPU path: limits, failures, and what it writes after each stage."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

PYTHON = [sys.executable, "-c"]
SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_check")


def records(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "gpu.json").read_text())
    return found


def test_each_stage_is_recorded_when_it_ends(gpu_check: Any, tmp_path: Path) -> None:
    check = gpu_check.Check(tmp_path)
    assert check.run("one", 60, [[*PYTHON, "print('first')"], [*PYTHON, "print('second')"]])
    assert [each["outcome"] for each in records(tmp_path)] == ["passed"]
    assert not check.run("two", 60, [[*PYTHON, "exit(3)"], [*PYTHON, "print('never')"]])
    assert not check.run("three", 1, [[*PYTHON, "import time; print('begun', flush=True); time.sleep(60)"]])
    assert [each["outcome"] for each in records(tmp_path)] == ["passed", "failed", "timed out"]
    assert records(tmp_path)[2]["wall_s"] < 30
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [line for line in log if line in ("first", "second", "never")] == ["first", "second"]


def test_skipped_tests_are_no_success(gpu_check: Any, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\npytest.skip('no GPU', allow_module_level=True)\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", f"--junitxml={report}"]
    assert not gpu_check.Check(tmp_path).run(
        "x", 60, [[*command, f"{tmp_path}/test_it.py", "--co", "-q"]], report
    )
    assert not gpu_check.Check(tmp_path).run("x", 60, [[*command, str(tmp_path / "test_it.py")]], report)


def test_the_stages_run_on_the_fakes(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = "tests/devices/test_nccl_failures.py::test_no_id_is_no_communicator"
    stage = gpu_check.Stage
    stages = (stage("facts", 10, module=("nothing",)), stage("failures", 100, (), (fast,)))
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    assert gpu_check.main(["--fakes", "--out", str(tmp_path)]) == 0
    assert [(each["stage"], each["tests"]["passed"]) for each in records(tmp_path)] == [("failures", 1)]


def test_all_stages_together_end_within_8_minutes(gpu_check: Any) -> None:
    assert gpu_check.BUILD_SECONDS + sum(stage.seconds for stage in gpu_check.STAGES) <= 480
