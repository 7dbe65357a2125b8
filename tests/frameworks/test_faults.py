"""Ranks that are killed or frozen during compiled steps: all others get an error that names them."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.frameworks import endless_steps
from tests.frameworks.doors import KNOBS, VARIABLES
from tests.hosts.faults import SLACK_S, Fault, try_fault
from tests.hosts.jobs import Shape
from tests.hosts.launch import Site
from tests.mpi.run_support import TIMEOUT_S, Ended, launcher_command, started

_SIZE = 3
_START_S = 120.0
_WITHIN_S = 6.0
_SHORT = ("--stall-check-warning-time-seconds", 0.5, "--stall-check-shutdown-time-seconds", 1)
_BACKEND = "jax"  # of Keras
_NEEDED = {"jax": ("jax",), "tensorflow": ("tensorflow",), "keras": ("keras", _BACKEND)}
doors = pytest.mark.parametrize("door", KNOBS)
frameworks = pytest.mark.parametrize(
    "framework",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                any(importlib.util.find_spec(each) is None for each in needed),
                reason=f"{', '.join(needed)}: not installed; `make test-frameworks` installs it",
            ),
        )
        for name, needed in _NEEDED.items()
    ],
)


def _environment(framework: str, door: str) -> dict[str, str]:
    return {
        **VARIABLES,
        "KERAS_BACKEND": _BACKEND,
        "PYHVD_GRAPH_OPS": KNOBS[door],
        endless_steps.FRAMEWORK: framework,
    }


@pytest.mark.timeout(400)
@frameworks
@doors
@pytest.mark.parametrize(
    ("kind", "shape"), [("kill", (1, 1, 1)), ("kill", (1, 2)), ("freeze", (1, 2))], ids=str
)
def test_a_lost_rank_leaves_elastic_run_of_all_others(
    site: Site, framework: str, door: str, kind: str, shape: Shape
) -> None:
    """A host with a killed rank is lost at once, a frozen one after 5 s; its error names the host's ranks."""
    fault = Fault(
        0, kind, shape, host=1, rank=1, moment=0.3, knobs=_environment(framework, door), holds=kind == "kill"
    )
    outcome = try_fault(site, replace(fault, program=endless_steps.__name__), SLACK_S)
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert outcome.errors == len(fault.survivors())


def _run_with_a_signal(folder: Path, env: dict[str, str], *flags: object) -> tuple[Ended, dict[int, str]]:
    """Let rank 1 of three get a signal; return the job's result, and the errors of the other ranks."""
    command = launcher_command("-n", _SIZE, *flags, endless_steps.__file__, folder)

    def errors() -> dict[int, str]:
        found = {rank: folder / f"ending{rank}" for rank in range(_SIZE)}
        return {rank: json.loads(path.read_text())["text"] for rank, path in found.items() if path.exists()}

    begun = time.monotonic()
    with started(command, env) as job:
        until = begun + _START_S
        while len(errors()) < _SIZE - 1 and job.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        (folder / "leave").touch()
        out, err = job.communicate(timeout=TIMEOUT_S)
    assert (folder / "struck").exists(), err
    return Ended(job.returncode, out, err, time.monotonic() - begun), errors()


@pytest.mark.timeout(400)
@pytest.mark.any_mpi
@frameworks
@doors
def test_the_error_names_a_rank_that_is_stopped(tmp_path: Path, framework: str, door: str) -> None:
    env = {**_environment(framework, door), endless_steps.STRIKE: "SIGSTOP"}
    ended, errors = _run_with_a_signal(tmp_path, env, *_SHORT)
    assert ended.code == 1, ended.err
    assert set(errors) == {0, 2}, ended.err
    for text in errors.values():
        assert "rank 1 on host " in text
        assert "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT" in text


@pytest.mark.timeout(400)
@pytest.mark.any_mpi
@frameworks
@doors
def test_a_killed_rank_ends_the_job(tmp_path: Path, framework: str, door: str) -> None:
    """On one host the launcher ends all others, which wait inside of their framework."""
    env = {**_environment(framework, door), endless_steps.STRIKE: "SIGKILL"}
    ended, _ = _run_with_a_signal(tmp_path, env)
    assert ended.code == 128 + 9, ended.err
    assert f"rank 1 of {_SIZE} " in ended.last
    assert "SIGKILL" in ended.last
    assert ended.at - float((tmp_path / "struck").read_text()) < _WITHIN_S, ended.err
