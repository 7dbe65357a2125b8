"""Logging in real jobs: the launcher's options, the variables, and which ranks log."""

from __future__ import annotations

import re

import pytest

from tests.mpi.run_support import bare, pyhvdrun

SAY = """
import logging, pyhvd as hvd
hvd.init()
logger = logging.getLogger("pyhvd")
for level in ("debug", "info", "warning", "error", "critical"):
    getattr(logger, level)("said " + level)
"""
LINE = re.compile(r"^(.*?)pyhvd\[(\S+)\] (\w+): said \w+$", re.MULTILINE)


def said(err: str) -> list[tuple[str, str]]:
    """Return rank and level of each line that the script logs, sorted."""
    return sorted((rank, level) for _, rank, level in LINE.findall(err))


@pytest.mark.any_mpi
def test_the_default_is_warning_and_shows_the_clock() -> None:
    ended = pyhvdrun("-n", 2, "-c", SAY)
    assert ended.code == 0, ended.err
    assert said(ended.err) == [(r, level) for r in "01" for level in ("CRITICAL", "ERROR", "WARNING")]
    clock = re.compile(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
    assert all(clock.fullmatch(before) for before, *_ in LINE.findall(ended.err))


@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
def test_options_win_over_the_environment(launched: bool) -> None:
    env = {"PYHVD_LOG_LEVEL": "fatal", "HOROVOD_LOG_HIDE_TIME": "0"}
    options = ["--log-level", "INFO", "--log-without-timestamp", "-c", SAY]
    ended = pyhvdrun("-n", 2, *options, env=env) if launched else bare(2, *options, env=env)
    assert ended.code == 0, ended.err
    others = [(r, level) for r in "01" for level in ("CRITICAL", "ERROR", "WARNING")]
    assert said(ended.err) == sorted([*others, ("0", "INFO")])
    assert {clock for clock, *_ in LINE.findall(ended.err)} == {""}


@pytest.mark.any_mpi
def test_horovods_variables_do_the_same() -> None:
    env = {"HOROVOD_LOG_LEVEL": "trace", "HOROVOD_LOG_HIDE_TIME": "1"}
    ended = pyhvdrun("-n", 2, "--log-with-timestamp", "-c", SAY, env=env)
    assert [level for rank, level in said(ended.err) if rank == "1"] == [
        "CRITICAL",
        "DEBUG",
        "ERROR",
        "WARNING",
    ]
    assert all(clock for clock, *_ in LINE.findall(ended.err))


@pytest.mark.any_mpi
def test_a_level_that_is_none_is_bad_usage() -> None:
    ended = pyhvdrun("-n", 2, "--log-level", "loud", "-c", SAY)
    assert ended.code == 2
    assert "expected one of trace, debug, info, warning, error, fatal, not 'loud'" in ended.last
