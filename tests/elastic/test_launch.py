"""pyhvd.launch with elastic jobs: the results are those of the last ranks."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
from tests.elastic.work import SUM, train, train_until_two
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


def test_an_object_finds_the_hosts() -> None:
    """It fails and finds rubbish while the job runs: nothing follows."""

    class Finds:
        calls = 0

        def find_available_hosts_and_slots(self) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("no answer")
            return {"east": 1, "west": 1} if self.calls == 1 else {"east": 0}

    results = hvd.launch(
        train, ("rank",), min_num_proc=2, max_num_proc=2, discovery=Finds(), launch_agent=LOCAL
    )
    assert results == [(0, 2, SUM, 1), (1, 2, SUM, 1)]


def test_a_function_adds_a_host() -> None:
    began: list[float] = []

    def find() -> list[str]:
        began.append(time.monotonic())
        return ["east:1", "west:1"] if len(began) > 2 else ["east"]

    results = hvd.launch(train_until_two, min_num_proc=1, discovery=find, launch_agent=LOCAL)
    assert results == [(0, 2, 1), (1, 2, 1)]
    assert min(later - earlier for earlier, later in pairwise(began)) > 0.9


def test_a_function_that_fails_at_first_ends_the_job() -> None:
    with pytest.raises(hvd.LaunchError, match="host discovery: the call raised ZeroDivisionError: "):
        hvd.launch(train, min_num_proc=1, discovery=lambda: {"east": 1 // 0})


def come_late() -> int:
    """Let rank 1 of the first generation not come to init(); return the generation."""
    if os.environ["HOROVOD_RANK"] == "1" and os.environ["PYHVD_ELASTIC_GENERATION"] == "0":
        time.sleep(100)
    hvd.init()
    return hvd.elastic.generation()


def test_a_rank_that_is_late_in_init_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "6")
    with caplog.at_level("DEBUG", "pyhvd"):
        assert hvd.launch(come_late, np=2, min_num_proc=2) == [1, 1]
    assert "rank 1 of 2 on host" in caplog.text
    assert "has not called init() within the start timeout of 6 s, and rank 0 waits for it" in caplog.text


@pytest.mark.parametrize(
    ("variable", "arguments"), [("1", {}), ("soon", {"elastic_timeout": 1})], ids=["variable", "argument"]
)
def test_the_elastic_timeout_ends_a_job_with_too_few_slots(
    variable: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument comes before the variable."""
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", variable)
    with pytest.raises(hvd.LaunchError, match=r"^too few hosts after 1 s \(elastic_timeout\): "):
        hvd.launch(train, min_num_proc=2, discovery=lambda: {"east": 1}, launch_agent=LOCAL, **arguments)


def test_output_goes_on_in_the_same_files(tmp_path: Path) -> None:
    hvd.launch(train, ("rank",), np=2, min_num_proc=2, output_filename=str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank.0", "rank.1"]
