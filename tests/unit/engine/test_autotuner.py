"""Autotuning on rank 0: the sampler, the samples, the changes of knobs, the CSV file."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pyhvd.config import Config
from pyhvd.dtypes import Code
from pyhvd.engine import autotuner as tuner_module
from pyhvd.engine.autotune_search import LADDERS, Search
from pyhvd.engine.autotuner import COLUMNS, SampleLog, Tuner, make_tuner, open_log, tuning_of
from pyhvd.errors import ConfigError
from pyhvd.native.shared_memory import Sampler
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind, Request, RequestType, Response
from tests.unit.engine.test_autotune_search import most_samples

DEFAULTS = tuning_of(Config())


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_module, "SHORTEST_SAMPLE", 0.0)


def batch_of(*names: str, count: int = 100) -> list[Response]:
    return [Response(Request(RequestType.ALLREDUCE, name, Code.FLOAT32, (count,))) for name in names]


def step(tuner: Tuner, batches: Sequence[list[Response]]) -> None:
    for batch in batches:
        tuner.count(batch)


def test_a_sample_is_so_many_whole_steps() -> None:
    sampler = Sampler()
    assert sampler.read() is None
    sampler.start(3, 1000, 0.0)
    for turn in range(1, 5):
        assert sampler.read() is None
        sampler.count(100, turn)  # "a"
        if turn < 4:
            sampler.count(7, turn)  # "b"
    read = sampler.read()
    assert read is not None
    assert read[0] == 3 * 107, "from behind the first 'a' to behind the fourth"
    assert read[1] >= 0
    assert not sampler.counts()
    sampler.count(5, 9)
    assert sampler.read() == read, "an ended sample is left alone"


def test_a_sample_lasts_as_long_as_it_must_and_ends_with_a_step() -> None:
    sampler = Sampler()
    sampler.start(1, 1000, 3600.0)
    for turn in range(1, 50):
        sampler.count(100, turn)
        sampler.count(7, turn)
    assert sampler.counts()
    sampler.start(1, 1000, 0.0)
    sampler.count(7, 1)
    sampler.count(100, 1)
    assert sampler.counts()
    sampler.count(7, 2)
    read = sampler.read()
    assert read is not None
    assert read[0] == 107


def test_where_nothing_comes_again_batches_are_counted() -> None:
    sampler = Sampler()
    sampler.start(2, 10, 3600.0)
    for _ in range(10):
        sampler.count(1, 1)
        assert sampler.counts()
    sampler.count(1, 1)
    assert sampler.read() is not None


def test_what_the_slow_lane_carries_out_is_counted_by_name() -> None:
    tuner = make_tuner(Config(autotune_steps_per_sample=2, autotune_warmup_samples=0), 2, None, windowed=True)
    assert tuner is not None
    tuner.count(batch_of("a", "b"))
    assert tuner.look() is None
    tuner.count(batch_of("c"))
    tuner.count(batch_of("a", "b"))
    tuner.count([Response(Request(RequestType.BARRIER, "barrier"))])
    failed = Request(RequestType.ALLREDUCE, "a", Code.FLOAT32, (100,))
    for _ in range(3):
        tuner.count([Response(failed, error=ErrorInfo(ErrorKind.MISMATCH, "shapes differ"))])
    assert tuner.sampler.counts()
    tuner.count(batch_of("b", "a"))
    read = tuner.sampler.read()
    assert read is not None
    assert read[0] == 400 * 5, "float32: one 'c' and two 'a' and 'b'"
    tuner.close()


def test_a_change_is_in_force_before_anything_is_measured_with_it() -> None:
    tuner = make_tuner(Config(autotune_steps_per_sample=1, autotune_warmup_samples=0), 2, None, windowed=True)
    assert tuner is not None
    changes = 0
    for _ in range(2 * most_samples(0)):
        tuner.count(batch_of("a"))
        tuner.count(batch_of("a"))
        change = tuner.look()
        if change is not None:
            changes += 1
            assert tuner.look() is None
            assert not tuner.sampler.counts()
            tuner.applied()
        if tuner.done:
            break
    assert tuner.done
    assert changes > 4
    assert tuner.look() is None
    assert not tuner.sampler.counts(), "nothing is measured any more"
    tuner.close()


@pytest.mark.parametrize(("windowed", "still"), [(True, "staging_size"), (False, "chunk_size")])
def test_what_is_given_or_does_not_matter_is_held(windowed: bool, still: str) -> None:
    config = Config.from_env({"PYHVD_CYCLE_TIME": "1"}, autotune=True)[0]
    tuner = make_tuner(config, 2, None, windowed=windowed)
    assert tuner is not None
    tried = {knob: set() for knob in LADDERS}  # type: dict[str, set[float]]
    tuning = DEFAULTS
    while not tuner.done:
        tuner.count(batch_of("a"))
        tuner.count(batch_of("a"))
        if (change := tuner.look()) is not None:
            tuning = change
            tuner.applied()
        for knob, values in tried.items():
            values.add(getattr(tuning, knob))
    tuner.close()
    assert {knob for knob, values in tried.items() if len(values) == 1} == {"cycle_time_ms", still}


def test_nothing_to_tune(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyhvd")
    knobs = dict.fromkeys(("fusion_threshold", "cycle_time_ms", "chunk_size"), 0)
    assert (
        make_tuner(Config.from_env({}, **{**knobs, "chunk_size": 1 << 18})[0], 2, None, windowed=True) is None
    )
    assert make_tuner(Config(), 1, None, windowed=True) is None
    assert [record.message for record in caplog.records] == [
        "autotune: nothing to tune: every knob was given",
        "autotune: nothing to tune: one rank",
    ]


def test_the_log_has_a_line_for_each_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyhvd")
    path = tmp_path / "tuned.csv"
    config = Config(autotune=True, autotune_log=str(path), autotune_steps_per_sample=1)
    log = open_log(config, 0)
    assert log is not None
    assert path.read_text() == ",".join(COLUMNS) + "\n", "it can be read from the start"
    tuner = make_tuner(config, 2, log, windowed=True)
    assert tuner is not None
    samples = 0
    while not tuner.done:
        tuner.count(batch_of("a"))
        tuner.count(batch_of("a"))
        samples += 1
        if tuner.look() is not None:
            tuner.applied()
    tuner.close()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [int(row["sample"]) for row in rows] == [*range(1, samples + 1), samples]
    assert {row["state"] for row in rows} >= {"warmup", "search", "done"}
    assert [row["state"] for row in rows[:4]] == ["warmup"] * 3 + ["search"]
    assert rows[-1]["state"] == "done"
    assert all(float(row["bytes_per_s"]) > 0 for row in rows[:-1])
    assert all(row["bytes"] == "400" for row in rows[:-1])
    times = [float(row["time_s"]) for row in rows]
    assert times == sorted(times)
    assert "autotune: " in caplog.records[-1].message
    assert f"PYHVD_CHUNK_SIZE={rows[-1]['chunk_size']}" in caplog.records[-1].message


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "tuned.csv")
    with pytest.raises(ConfigError) as error:
        SampleLog(path)
    assert str(error.value) == f"PYHVD_AUTOTUNE_LOG={path!r} cannot be written: No such file or directory"
    config = Config(autotune=True, autotune_log=path)
    assert open_log(config, 1) is None
    assert open_log(Config(autotune_log=path), 0) is None


def test_a_disk_that_is_full_from_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^PYHVD_AUTOTUNE_LOG='/dev/full' cannot be written: No space"):
        SampleLog("/dev/full")


def test_a_disk_that_gets_full_ends_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.csv"
    log = SampleLog(str(path))
    tuning = tuning_of(Config())
    log.sample("search", tuning, 1000, 0.5)
    written = path.read_bytes()
    full = os.open("/dev/full", os.O_WRONLY)
    assert log._file is not None
    os.dup2(full, log._file.fileno())
    os.close(full)
    for _ in range(2):
        log.sample("search", tuning, 1000, 0.5)
    log.kept(tuning)
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"PYHVD_AUTOTUNE_LOG={str(path)!r} ends here: No space left on device"
    ]
    assert path.read_bytes() == written


def test_the_end_of_the_job_is_no_end_of_the_search(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyhvd")
    Tuner(Search(DEFAULTS, ("chunk_size",)), 10, Sampler(), None).close()
    assert "ended before the search did" in caplog.text
