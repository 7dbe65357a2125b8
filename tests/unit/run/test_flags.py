"""The launcher's flags and config file that stand for variables of the ranks."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest

from pyhvd.config import _WITHOUT_EFFECT, Config, suffix_of
from pyhvd.run.cli import parse
from pyhvd.run.flags import SETTINGS, ConfigFileError, read_config_file

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


def test_every_setting_is_one_that_the_ranks_know() -> None:
    known = {f"PYHVD_{suffix_of(knob)}" for knob in Config.knobs()}
    assert {setting.variable for setting in SETTINGS} <= known | {f"PYHVD_{name}" for name in _WITHOUT_EFFECT}


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
        ("autotune: {gaussian_process_noise: 2}", "expected a number from 0 to 1"),
        ("params: {cycle_time_ms: -1}", "params.cycle_time_ms: -1: expected a number >= 0"),
        ("params: {cycle_time_ms: fast}", "params.cycle_time_ms: 'fast': expected a number >= 0"),
        ("params: {fusion_threshold_mb: true}", "expected a number >= 0"),
        ("autotune: {log_file: 3}", "autotune.log_file: 3: expected text"),
        (
            "autotune: {speed: 3}",
            "autotune.speed is not a setting; the settings are autotune.bayes_opt_max_samples, ",
        ),
        ("autotune: 1", "expected sections with entries"),
        ("controller: {use: mpi}", "controller: {'use': 'mpi'}: expected text"),
        ("[1, 2]", "expected sections with entries"),
        ("a: [", "cannot read "),
    ],
)
def test_what_a_config_file_must_not_say(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pyhvd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=re.escape(message)):
        read_config_file(str(path))
    with pytest.raises(SystemExit, match="2"):
        settings_for("--config-file", str(path))
    assert message in capsys.readouterr().err


def test_a_config_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="No such file"):
        read_config_file(str(tmp_path / "missing.yaml"))


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigFileError, match=re.escape('pip install "pyhvd[cli]"')):
        read_config_file("any.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cycle-time-ms", "fast"), "--cycle-time-ms: expected a number >= 0, not 'fast'"),
        (("--cache-capacity", "1.5"), "--cache-capacity: expected a whole number, not '1.5'"),
        (("--autotune-gaussian-process-noise", "7"), "expected a number from 0 to 1, not '7'"),
    ],
)
def test_what_flags_must_not_say(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        settings_for(*arguments)
    assert message in capsys.readouterr().err
