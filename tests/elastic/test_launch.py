"""pyhvd.launch with elastic jobs: the results are those of the last ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import pyhvd as hvd
from tests.elastic.work import SUM, train
from tests.many_hosts import LOCAL

pytestmark = pytest.mark.timeout(60)


def test_a_killed_rank_is_started_again() -> None:
    assert hvd.launch(train, ("rank",), np=2, min_num_proc=2) == [(0, 2, SUM, 1), (1, 2, SUM, 1)]


def test_without_a_fault_nothing_is_started_again() -> None:
    assert hvd.launch(train, np=2, min_num_proc=1) == [(0, 2, SUM, 0), (1, 2, SUM, 0)]


def test_the_same_error_each_time_ends_the_job() -> None:
    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2") as raised:
        hvd.launch(train, ("always",), np=2, min_num_proc=2)
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_script_finds_the_hosts(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho east\necho west\n")
    script.chmod(0o700)
    results = hvd.launch(
        train,
        ("rank",),
        min_num_proc=2,
        max_num_proc=2,
        host_discovery_script=str(script),
        launch_agent=LOCAL,
    )
    assert results == [(0, 2, SUM, 1), (1, 2, SUM, 1)]


def test_output_goes_on_in_the_same_files(tmp_path: Path) -> None:
    hvd.launch(train, ("rank",), np=2, min_num_proc=2, output_filename=str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank.0", "rank.1"]
