"""The launcher's flags and config file that stand for variables of the ranks."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from pyhvd.config import Config
from pyhvd.errors import ConfigError
from pyhvd.run.cli import parse
from pyhvd.run.flags import SETTINGS, read_config_file

pytest.importorskip("yaml")

FILE = """\
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 2.5
  cache_capacity: 100
autotune:
  enabled: true
  log_file: tuned.csv
  warmup_samples: 1
  steps_per_sample: 20
  bayes_opt_max_samples: 20
  gaussian_process_noise: 0.8
timeline: {filename: trace.json, mark_cycles: false}
stall_check: {enabled: false, warning_time_seconds: 30}
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 1
  thread_affinity: 0
  gloo_timeout_seconds: 30
logging: {level: info, with_timestamp: true}
controller: mpi
"""

MEANT = {
    "PYHVD_FUSION_THRESHOLD": str(32 << 20),
    "PYHVD_CYCLE_TIME": "2.5",
    "PYHVD_CACHE_CAPACITY": "100",
    "PYHVD_AUTOTUNE": "1",
    "PYHVD_AUTOTUNE_LOG": "tuned.csv",
    "PYHVD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "PYHVD_AUTOTUNE_STEPS_PER_SAMPLE": "20",
    "PYHVD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    "PYHVD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.8",
    "PYHVD_TIMELINE": "trace.json",
    "PYHVD_TIMELINE_MARK_CYCLES": "0",
    "PYHVD_STALL_CHECK_DISABLE": "1",
    "PYHVD_STALL_CHECK_TIME_SECONDS": "30",
    "PYHVD_LOG_LEVEL": "info",
    "PYHVD_LOG_HIDE_TIME": "0",
    "PYHVD_MPI_THREADS_DISABLE": "1",
    "PYHVD_NUM_NCCL_STREAMS": "1",
    "PYHVD_THREAD_AFFINITY": "0",
    "PYHVD_GLOO_TIMEOUT_SECONDS": "30",
    "PYHVD_CONTROLLER": "mpi",
}


def settings_for(*arguments: str) -> dict[str, str]:
    return parse(["-n", "2", *arguments, "train.py"], under_mpiexec=False).settings


def test_help_shows_each_knob_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        settings_for("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--cache-capacity N responses remembered per process set (the fast lane: at most 65,536);" in text
    assert "(default: PYHVD_CACHE_CAPACITY, or 4096)" in text
    assert "(default: PYHVD_FUSION_THRESHOLD, or 128)" in text  # in the flag's unit
    assert (
        "with --no-: no warnings about stalled tensors (default: PYHVD_STALL_CHECK_DISABLE, or off)" in text
    )
    assert text.count("--torus-allreduce") == 1
    shown = {setting.flag for setting in SETTINGS if setting.knob is not None}
    assert all(flag in text for flag in shown)


def test_nothing_is_set_unasked() -> None:
    assert settings_for() == {}


def test_flags() -> None:
    asked = settings_for(
        *("--fusion-threshold-mb", "0.5", "--cycle-time-ms", "3", "--cache-capacity", "0", "--autotune"),
        *(
            "--autotune-log-file",
            "a.csv",
            "--autotune-warmup-samples",
            "2",
            "--autotune-steps-per-sample",
            "5",
        ),
        *("--autotune-bayes-opt-max-samples", "9", "--autotune-gaussian-process-noise", "0.5"),
    )
    assert asked == {
        "PYHVD_FUSION_THRESHOLD": str(1 << 19),
        "PYHVD_CYCLE_TIME": "3",
        "PYHVD_CACHE_CAPACITY": "0",
        "PYHVD_AUTOTUNE": "1",
        "PYHVD_AUTOTUNE_LOG": "a.csv",
        "PYHVD_AUTOTUNE_WARMUP_SAMPLES": "2",
        "PYHVD_AUTOTUNE_STEPS_PER_SAMPLE": "5",
        "PYHVD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "9",
        "PYHVD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.5",
    }
    config, notices = Config.from_env(asked)
    assert config.autotune
    assert config.given == {
        *("fusion_threshold", "cycle_time_ms", "cache_capacity", "autotune", "autotune_log"),
        *("autotune_warmup_samples", "autotune_steps_per_sample"),
    }
    assert notices == [
        "this version of pyhvd does not act on"
        " PYHVD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES, PYHVD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
    ]


def test_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "pyhvd.yaml"
    path.write_text(FILE)
    assert settings_for("--config-file", str(path)) == MEANT
    flags = ("--no-autotune", "--cycle-time-ms", "7")
    assert settings_for("--config-file", str(path), *flags) == {
        **MEANT,
        "PYHVD_AUTOTUNE": "0",
        "PYHVD_CYCLE_TIME": "7",
    }
    for nothing in ("", "timeline:\n"):
        path.write_text(nothing)
        assert settings_for("--config-file", str(path)) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("autotune: {enabled: 1}", "autotune.enabled: 1: expected true or false"),
        ("autotune: {steps_per_sample: 2.5}", "autotune.steps_per_sample: 2.5: expected a whole number"),
        ("autotune: {steps_per_sample: 0}", "autotune.steps_per_sample: 0: expected a number >= 1"),
        ("params: {cycle_time_ms: -1}", "params.cycle_time_ms: -1: expected a finite number >= 0"),
        ("params: {cycle_time_ms: fast}", "params.cycle_time_ms: 'fast': expected a number"),
        ("params: {fusion_threshold_mb: true}", "params.fusion_threshold_mb: True: expected a number"),
        ("params: {fusion_threshold_mb: .inf}", "params.fusion_threshold_mb: inf: expected a number"),
        ("logging: {level: loud}", "logging.level: 'loud': expected one of trace, debug, info"),
        ("autotune: {log_file: 3}", "autotune.log_file: 3: expected text"),
        ("autotune: 1", "expected sections with entries"),
        ("[1, 2]", "expected sections with entries"),
        ("a: [", "cannot read "),
    ],
)
def test_what_a_config_file_must_not_say(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pyhvd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config_file(str(path), print)
    with pytest.raises(SystemExit, match="2"):
        settings_for("--config-file", str(path))
    assert message in capsys.readouterr().err


def test_unknown_entries_of_a_config_file_are_said_and_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "horovod.yaml"
    path.write_text("timeline: {filename: t, speed: 3}\nelastic: {timeout: 5}\nverbose: true\n")
    assert settings_for("--config-file", str(path)) == {"PYHVD_TIMELINE": "t"}
    sections = "a section of autotune, library_options, logging, metrics, params, stall_check, timeline"
    assert capsys.readouterr().err.splitlines() == [
        f"pyhvd: {path}: timeline.speed has no effect: expected timeline.filename, timeline.mark_cycles",
        f"pyhvd: {path}: elastic.timeout has no effect: expected {sections}, or controller",
        f"pyhvd: {path}: verbose has no effect: expected {sections}, or controller",
    ]
    parse(["--config-file", str(path), "x.py"], under_mpiexec=True, tells=False)  # a rank other than 0
    assert capsys.readouterr().err == ""


# Of horovodrun 0.28, but for those that other tests have.
HOROVODS = (
    *("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather"),
    *("--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--mpi-threads-disable"),
    *("--no-mpi-threads-disable", "--num-nccl-streams 2", "--thread-affinity 0"),
    "--gloo-timeout-seconds 9",
    *("--slots 2", "--slots-per-host 2", "--disable-cache", "--tcp", "--mpi", "--gloo", "--verbose"),
    *("--start-timeout 5", "--network-interface lo", "--network-interfaces lo", "--output-filename o"),
    *("--elastic-timeout 5 --min-np 1", "--reset-limit 1 --min-num-proc 1", "--max-num-proc 3 --min-np 1"),
    *("--blacklist-cooldown-range 1 2", "-p 22", "-i key", "-hostfile f", "-H h:2", "--log-level INFO"),
    *("--log-hide-timestamp", "--no-log-hide-timestamp", "-prefix-timestamp", "--binding-args=x"),
    *("--no-autotune", "--stall-check", "--no-stall-check", "--no-timeline-mark-cycles", "--mpi-args=-x"),
)


@pytest.mark.parametrize("flags", HOROVODS)
def test_flags_of_horovodrun_are_known(flags: str) -> None:
    assert parse(["-np", "2", *flags.split(), "train.py"], under_mpiexec=False).program == ["train.py"]


def test_flags_without_effect_are_said_as_their_variables_are() -> None:
    asked = settings_for(
        *("--hierarchical-allreduce", "--no-torus-allreduce", "--num-nccl-streams", "2"),
        *("--gloo-timeout-seconds", "9", "--thread-affinity", "0,2", "--mpi-threads-disable"),
    )
    config, notices = Config.from_env(asked)
    assert config.mpi_threads_disable
    assert notices == [
        "this version of pyhvd does not act on PYHVD_GLOO_TIMEOUT_SECONDS, PYHVD_HIERARCHICAL_ALLREDUCE,"
        " PYHVD_NUM_NCCL_STREAMS, PYHVD_THREAD_AFFINITY, PYHVD_TORUS_ALLREDUCE"
    ]
    known = parse(["-H", "h", "--slots", "3", "train.py"], under_mpiexec=False)
    assert known.slots_per_host == 3


@pytest.mark.parametrize("prefix", ["PYHVD_", "HOROVOD_"])
def test_timeouts_come_from_the_environment(
    prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timeouts(*flags: str) -> tuple[float, float]:
        options = parse(["-n", "2", "--min-np", "1", *flags, "train.py"], under_mpiexec=False)
        return options.start_timeout, options.elastic.timeout

    assert timeouts() == (30, 600)
    monkeypatch.setenv(f"{prefix}START_TIMEOUT", "7")
    monkeypatch.setenv(f"{prefix}ELASTIC_TIMEOUT", "8.5")
    assert timeouts() == (7, 8.5)
    assert timeouts("--start-timeout", "1", "--elastic-timeout", "2") == (1, 2)
    for wrong in ("soon", "0", "-1", "inf", ""):
        monkeypatch.setenv(f"{prefix}START_TIMEOUT", wrong)
        with pytest.raises(SystemExit, match="2"):
            timeouts()
        expected = f"{prefix}START_TIMEOUT={wrong!r}: expected a number of seconds above 0"
        assert expected in capsys.readouterr().err


def test_a_config_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(str(tmp_path / "missing.yaml"), print)


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape('pip install "pyhvd[cli]"')):
        read_config_file("any.yaml", print)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cycle-time-ms", "fast"), "--cycle-time-ms: expected a number, not 'fast'"),
        (
            ("--cache-capacity", "1.5"),
            "--cache-capacity: expected a whole number, in digits alone, not '1.5'",
        ),
        (("--log-level", "loud"), "--log-level: expected one of trace, debug, info"),
    ],
)
def test_what_flags_must_not_say(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        settings_for(*arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--min-np 1 --elastic-resume r",
            "--elastic-resume goes on from the elastic store: give --elastic-store",
        ),
        ("--elastic-resume r", "--elastic-resume is for elastic jobs: give --min-np too"),
    ],
)
def test_a_job_that_can_be_resumed_is_elastic_and_has_a_store(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["-n", "2", *flags.split(), "train.py"], under_mpiexec=False)
    assert message in capsys.readouterr().err
