"""Configuration: every knob, both prefixes, the notices, and the errors for invalid values."""

from __future__ import annotations

import dataclasses
import math
import re
import threading
from typing import Any

import numpy as np
import pytest

from pyhvd.config import SHARED, Config, suffix_of
from pyhvd.errors import ConfigError

GOOD: dict[str, tuple[str, str, Any]] = {
    "fusion_threshold": ("FUSION_THRESHOLD", "1048576", 1048576),
    "cycle_time_ms": ("CYCLE_TIME", "2.5", 2.5),
    "chunk_size": ("CHUNK_SIZE", "65536", 65536),
    "staging_size": ("STAGING_SIZE", "1000000", 1000000),
    "cache_capacity": ("CACHE_CAPACITY", "0", 0),
    "pool_size": ("POOL_SIZE", "0", 0),
    "disable_group_fusion": ("DISABLE_GROUP_FUSION", "1", True),
    "device_fusion": ("DEVICE_FUSION", "Call", "call"),
    "device_wait": ("DEVICE_WAIT", "HOST", "host"),
    "dynamic_process_sets": ("DYNAMIC_PROCESS_SETS", "true", True),
    "stall_check_disable": ("STALL_CHECK_DISABLE", "yes", True),
    "stall_check_time_seconds": ("STALL_CHECK_TIME_SECONDS", "1e1", 10.0),
    "stall_shutdown_time_seconds": ("STALL_SHUTDOWN_TIME_SECONDS", "90", 90.0),
    "autotune": ("AUTOTUNE", "true", True),
    "autotune_log": ("AUTOTUNE_LOG", "tuned.csv", "tuned.csv"),
    "autotune_warmup_samples": ("AUTOTUNE_WARMUP_SAMPLES", "0", 0),
    "autotune_steps_per_sample": ("AUTOTUNE_STEPS_PER_SAMPLE", "25", 25),
    "mpi_threads_disable": ("MPI_THREADS_DISABLE", "on", True),
    "allow_alone": ("ALLOW_ALONE", "1", True),
    "fast_lane": ("FAST_LANE", "off", False),
    "links": ("LINKS", "0", False),
    "link_interfaces": ("LINK_INTERFACES", "eth0, 10.0.0.0/8", "eth0, 10.0.0.0/8"),
    "link_ports": ("LINK_PORTS", " 40000 - 40999 ", "40000-40999"),
    "link_carrier": ("LINK_CARRIER", "MPI", "mpi"),
    "graph_wait_ms": ("GRAPH_WAIT", "2.5", 2.5),
    "graph_ops": ("GRAPH_OPS", "Callback", "callback"),
    "timeline": ("TIMELINE", "/tmp/job.json", "/tmp/job.json"),
    "timeline_mark_cycles": ("TIMELINE_MARK_CYCLES", "1", True),
    "check": ("CHECK", "Finite, results", "results,finite"),
    "metrics_port": ("METRICS_PORT", "9400", 9400),
    "metrics_address": ("METRICS_ADDRESS", "0.0.0.0", "0.0.0.0"),
    "metrics_targets": ("METRICS_TARGETS", "/var/targets", "/var/targets"),
    "log_level": ("LOG_LEVEL", " DEBUG ", "debug"),
    "log_hide_time": ("LOG_HIDE_TIME", "True", True),
}
ALONE = {
    "autotune_log": "PYHVD_AUTOTUNE_LOG has no effect without PYHVD_AUTOTUNE=1",
    "metrics_targets": "PYHVD_METRICS_TARGETS has no effect without PYHVD_METRICS_PORT, such as 0",
}
each_knob = pytest.mark.parametrize("knob", GOOD)


def test_the_table_here_is_complete() -> None:
    assert list(GOOD) == [k.name for k in Config.knobs()]
    assert [GOOD[k.name][0] for k in Config.knobs()] == [suffix_of(k) for k in Config.knobs()]


def test_defaults_are_horovods() -> None:
    config, notices = Config.from_env({})
    assert notices == []
    assert config == Config()
    assert (config.fusion_threshold, config.cycle_time_ms, config.cache_capacity) == (128 * 2**20, 1.0, 4096)
    assert (config.stall_check_time_seconds, config.stall_shutdown_time_seconds) == (60.0, 0.0)
    switches = (config.disable_group_fusion, config.dynamic_process_sets, config.stall_check_disable)
    assert not any(switches)


@each_knob
def test_every_knob_under_its_own_name(knob: str) -> None:
    suffix, text, value = GOOD[knob]
    config, notices = Config.from_env({f"PYHVD_{suffix}": text})
    assert getattr(config, knob) == value
    assert type(getattr(config, knob)) is type(value)
    assert notices == ([ALONE[knob]] if knob in ALONE else [])
    assert config.given == {knob}
    assert config == dataclasses.replace(Config(), **{knob: value}), "no other knob has moved"


@each_knob
def test_every_knob_under_horovods_name(knob: str) -> None:
    suffix, text, value = GOOD[knob]
    config, notices = Config.from_env({f"HOROVOD_{suffix}": text})
    assert getattr(config, knob) == value
    assert notices[0] == f"read HOROVOD_{suffix}; pyhvd's own names are PYHVD_<same suffix>"
    alone = {each: text.replace("PYHVD", "HOROVOD", 1) for each, text in ALONE.items()}
    assert notices[1:] == ([alone[knob]] if knob in alone else [])


def test_pyhvds_own_name_wins_without_a_notice() -> None:
    config, notices = Config.from_env({"PYHVD_CACHE_CAPACITY": "3", "HOROVOD_CACHE_CAPACITY": "nonsense"})
    assert (config.cache_capacity, notices) == (3, [])


def test_overrides_win_over_both() -> None:
    env = {"PYHVD_CACHE_CAPACITY": "3", "HOROVOD_CYCLE_TIME": "4"}
    config, _ = Config.from_env(env, cache_capacity=5, cycle_time_ms=6.0)
    assert (config.cache_capacity, config.cycle_time_ms) == (5, 6.0)


def test_what_was_given_is_known_even_where_it_is_the_default() -> None:
    env = {"PYHVD_FUSION_THRESHOLD": str(Config().fusion_threshold), "HOROVOD_CYCLE_TIME": "1"}
    assert Config.from_env(env, fast_lane=True)[0].given == {
        "fusion_threshold",
        "cycle_time_ms",
        "fast_lane",
    }
    assert Config.from_env({})[0].given == Config().given == frozenset()


def test_the_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYHVD_CACHE_CAPACITY", "77")
    assert Config.from_env()[0].cache_capacity == 77


def test_a_path_that_all_ranks_are_told_is_text() -> None:
    assert Config.from_env({"PYHVD_TIMELINE": "für/alle.json"})[0].timeline == "für/alle.json"
    with pytest.raises(ConfigError, match=r"^PYHVD_TIMELINE='\\udcff.json': expected text that UTF-8"):
        Config.from_env({"PYHVD_TIMELINE": "\udcff.json"})  # as Python reads the byte 0xff


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "TRUE", "Yes", " on "])
def test_words_for_true(word: str) -> None:
    assert Config.from_env({"PYHVD_LOG_HIDE_TIME": word})[0].log_hide_time


@pytest.mark.parametrize("word", ["0", "false", "no", "off", "", "FALSE", " No "])
def test_words_for_false(word: str) -> None:
    assert not Config.from_env({"PYHVD_LOG_HIDE_TIME": word})[0].log_hide_time


@pytest.mark.parametrize("prefix", ["PYHVD_", "HOROVOD_"])
@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        *[("FUSION_THRESHOLD", text) for text in ("", "lots", "-1", "1.5", "64MB", "(None,)", "nan")],
        *[("CYCLE_TIME", text) for text in ("", "fast", "-1", "nan", "inf", "(None,)", "1e10")],
        *[("CACHE_CAPACITY", text) for text in ("-1", "yes", "1e3", str(2**60 + 1))],
        *[("DISABLE_GROUP_FUSION", text) for text in ("2", "maybe", "tru")],
        *[("CHUNK_SIZE", text) for text in ("0", "16000", "16385", "1e6", str(2**41))],
        *[("STAGING_SIZE", text) for text in ("0", "-4", str(10**30))],
        ("AUTOTUNE_WARMUP_SAMPLES", "-1"),
        *[("AUTOTUNE_STEPS_PER_SAMPLE", text) for text in ("0", "many")],
        *[("LOG_LEVEL", text) for text in ("", "loud", "10")],
        *[("STALL_CHECK_TIME_SECONDS", text) for text in ("-0.1", "1e300")],
        *[("METRICS_PORT", text) for text in ("-1", "65536", "http")],
    ],
)
def test_a_value_that_is_none_is_an_error_that_names_the_variable(
    prefix: str, suffix: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{prefix}{suffix}={text!r}: ")):
        Config.from_env({prefix + suffix: text})


def test_the_message_says_what_was_expected() -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_env({"PYHVD_LOG_HIDE_TIME": "ja"})
    assert str(error.value) == (
        "PYHVD_LOG_HIDE_TIME='ja': expected one of 1, 0, true, false, yes, no, on, off"
    )
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("PYHVD_FUSION_THRESHOLD", "64MB", "expected a whole number, in digits alone"),
        ("PYHVD_FUSION_THRESHOLD", "-1", "expected a number >= 0"),
        ("PYHVD_CHUNK_SIZE", "16385", "expected a multiple of 128"),
        ("PYHVD_METRICS_PORT", "65536", "expected a number <= 65535"),
        ("PYHVD_CYCLE_TIME", "fast", "expected a number"),
        ("PYHVD_STALL_CHECK_TIME_SECONDS", "1e10", "expected a number <= 1e+09"),
    ],
)
def test_what_is_said_of_numbers(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_env({variable: text})
    assert str(error.value) == f"{variable}={text!r}: {expected}"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("fusion_threshold", "64", "expected a whole number"),
        ("fusion_threshold", 1.5, "expected a whole number"),
        ("fusion_threshold", True, "expected a whole number"),
        ("fusion_threshold", -1, "expected a number >= 0"),
        ("cache_capacity", None, "expected a whole number"),
        ("chunk_size", 16385, "expected a multiple of 128"),
        ("chunk_size", 0, "expected a number >= 16384"),
        ("cycle_time_ms", "1", "expected a number"),
        ("cycle_time_ms", math.nan, "expected a finite number >= 0"),
        ("stall_check_time_seconds", 1e10, "expected a number <= 1e+09"),
        ("fast_lane", 1, "expected True or False"),
        ("fast_lane", "off", "expected True or False"),
        ("timeline", 3, "expected a string"),
        ("timeline", "hdfs:/x", "expected a local path, not a URL of another file system"),
        ("autotune_log", "s3:/b/x.csv", "expected a local path, not a URL of another file system"),
        ("timeline", "\udcff", "expected text that UTF-8 can encode"),
        ("check", "everything", "expected 0, 1, results, finite or results,finite"),
        ("log_level", "loud", "expected one of trace, debug, info, warning, error, fatal"),
        ("metrics_port", "9400", "expected a whole number or None"),
        ("metrics_port", 65536, "expected a number <= 65535"),
    ],
)
def test_a_field_given_by_hand_is_checked_as_its_variable_is(field: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**{field: value})
    assert str(error.value) == f"{field}={value!r}: {expected}"
    with pytest.raises(ConfigError):
        Config.from_env({}, **{field: value})


@each_knob
def test_a_field_given_by_hand_is_what_its_variable_gives(knob: str) -> None:
    _, _, value = GOOD[knob]
    assert getattr(Config(**{knob: value}), knob) == value


def test_numbers_by_hand_become_the_fields_own() -> None:
    int64: Any = np.int64(3)
    config = Config(cycle_time_ms=2, cache_capacity=int64, log_level="DEBUG", metrics_port=None)
    assert (config.cycle_time_ms, type(config.cycle_time_ms)) == (2.0, float)
    assert (config.cache_capacity, type(config.cache_capacity)) == (3, int)
    assert (config.log_level, config.metrics_port) == ("debug", None)
    with pytest.raises(ConfigError, match="PYHVD_STALL_SHUTDOWN_TIME_SECONDS=30 is less than"):
        Config(stall_shutdown_time_seconds=30)


def test_the_longest_time_can_be_waited_for() -> None:
    config, _ = Config.from_env({"PYHVD_STALL_CHECK_TIME_SECONDS": "1e9"})
    event = threading.Event()
    event.set()
    assert event.wait(2 * config.stall_check_time_seconds)


def test_a_job_must_not_end_before_its_warning() -> None:
    with pytest.raises(ConfigError, match="PYHVD_STALL_SHUTDOWN_TIME_SECONDS=30 is less than"):
        Config.from_env({"PYHVD_STALL_SHUTDOWN_TIME_SECONDS": "30"})
    env = {"PYHVD_STALL_SHUTDOWN_TIME_SECONDS": "30", "PYHVD_STALL_CHECK_TIME_SECONDS": "30"}
    assert Config.from_env(env)[0].stall_shutdown_time_seconds == 30.0


def test_what_has_no_effect_is_said() -> None:
    env = {
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "1",
        "PYHVD_THREAD_AFFINITY": "0,1",
        "HOROVOD_UNRELATED": "1",
        "PATH": "/",
    }
    _, notices = Config.from_env(env)
    assert notices == [
        "this version of pyhvd does not act on HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE, PYHVD_THREAD_AFFINITY"
    ]


def test_several_borrowed_names_make_one_notice() -> None:
    _, notices = Config.from_env({"HOROVOD_LOG_LEVEL": "info", "HOROVOD_CYCLE_TIME": "1"})
    assert notices == [
        "read HOROVOD_CYCLE_TIME, HOROVOD_LOG_LEVEL; pyhvd's own names are PYHVD_<same suffix>"
    ]


def test_the_table_lists_every_knob() -> None:
    lines = Config.describe().splitlines()
    assert [line.split()[0] for line in lines] == [f"PYHVD_{suffix}" for suffix, _, _ in GOOD.values()]
    assert lines[0].split()[1] == str(128 * 2**20)


def test_what_all_ranks_share_is_a_knob() -> None:
    assert set(SHARED) <= {k.name for k in Config.knobs()}


def test_nothing_can_be_changed_or_misspelt() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().cache_capacity = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config.from_env({}, cache_capcity=3)


def test_errors_and_notices_name_the_variable_that_the_user_has_set() -> None:
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "9", "PYHVD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    expected = "PYHVD_STALL_SHUTDOWN_TIME_SECONDS=3 is less than HOROVOD_STALL_CHECK_TIME_SECONDS=9"
    with pytest.raises(ConfigError, match=expected):
        Config.from_env(times)
    expected = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=3 is less than PYHVD_STALL_CHECK_TIME_SECONDS=60"
    with pytest.raises(ConfigError, match=expected):
        Config.from_env({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"})
    config, notices = Config.from_env({"HOROVOD_AUTOTUNE_LOG": "a", "PYHVD_CHECK": "1"})
    assert notices[1:] == ["HOROVOD_AUTOTUNE_LOG has no effect without PYHVD_AUTOTUNE=1"]
    assert config.users_words("PYHVD_AUTOTUNE_LOG, PYHVD_CHECK") == "HOROVOD_AUTOTUNE_LOG, PYHVD_CHECK"
