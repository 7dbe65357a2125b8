"""Flags and config-file entries, each of which sets an environment variable of the ranks.

Owns their table, with Horovod's names, and the config file (YAML, read with PyYAML). It rejects plainly wrong
values; on the ranks, :mod:`pyhvd.config` interprets them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any


class ConfigFileError(ValueError):
    """The config file cannot be read, or has an unknown entry or a wrong value."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


def _number(value: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        raise ValueError("expected a number >= 0")
    return f"{number:.15g}"


def _megabytes(value: Any) -> str:
    return str(round(float(_number(value)) * (1 << 20)))


def _whole(value: Any) -> str:
    number = float(_number(value))
    if number != int(number):
        raise ValueError("expected a whole number")
    return str(int(number))


def _port(value: Any) -> str:
    number = _whole(value)
    if int(number) >= 1 << 16:
        raise ValueError("expected a port, 0 to 65535")
    return number


def _fraction(value: Any) -> str:
    number = _number(value)
    if float(number) > 1:
        raise ValueError("expected a number from 0 to 1")
    return number


def _switch(value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return str(int(value))


def _opposite(value: Any) -> str:
    return "0" if _switch(value) == "1" else "1"


@dataclass(frozen=True)
class Setting:
    """One variable, with its flag and its config-file entry.

    Attributes
    ----------
    entry : str
        Section and key in the config file; ``controller`` has no section.
    variable : str
        The variable of the ranks.
    convert : callable
        Converts the value in the file or on the command line to the variable's text; raises ValueError.
    takes : str
        The flag's argument in ``--help``; empty for a switch, which has a ``--no-`` form.
    help : str
        The text in ``--help``; empty if there is no flag.
    """

    entry: str
    variable: str
    convert: Callable[[Any], str]
    takes: str = ""
    help: str = ""

    @property
    def flag(self) -> str:
        """The flag on the command line: named as the entry, without ``params`` and ``enabled``."""
        name = self.entry.removeprefix("params.").removesuffix(".enabled")
        return "--" + name.replace(".", "-").replace("_", "-")


SETTINGS = (
    Setting(
        "params.fusion_threshold_mb",
        "PYHVD_FUSION_THRESHOLD",
        _megabytes,
        "MB",
        "fuse tensors up to MB mebibytes; 0: no fusion (default: 128)",
    ),
    Setting(
        "params.cycle_time_ms",
        "PYHVD_CYCLE_TIME",
        _number,
        "MS",
        "collect submissions for at most MS milliseconds (default: 1)",
    ),
    Setting(
        "params.cache_capacity",
        "PYHVD_CACHE_CAPACITY",
        _whole,
        "N",
        "remember N responses per process set; 0: none (default: 1024)",
    ),
    Setting(
        "autotune.enabled",
        "PYHVD_AUTOTUNE",
        _switch,
        "",
        "search for the best fusion threshold, cycle time and chunk size; given values stay",
    ),
    Setting(
        "autotune.log_file",
        "PYHVD_AUTOTUNE_LOG",
        _text,
        "FILE",
        "write each sample of the search to FILE, as CSV",
    ),
    Setting(
        "autotune.warmup_samples",
        "PYHVD_AUTOTUNE_WARMUP_SAMPLES",
        _whole,
        "N",
        "discard N samples before the search (default: 3)",
    ),
    Setting(
        "autotune.steps_per_sample",
        "PYHVD_AUTOTUNE_STEPS_PER_SAMPLE",
        _whole,
        "N",
        "take a sample over N steps of the program (default: 10)",
    ),
    Setting(
        "autotune.bayes_opt_max_samples",
        "PYHVD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        _whole,
        "N",
        "no effect: the search is not Bayesian",
    ),
    Setting(
        "autotune.gaussian_process_noise",
        "PYHVD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        _fraction,
        "X",
        "no effect: the search is not Bayesian",
    ),
    Setting(
        "metrics.port",
        "PYHVD_METRICS_PORT",
        _port,
        "PORT",
        "serve each rank's metrics for Prometheus on PORT + its local rank; 0: on any free port",
    ),
    Setting(
        "metrics.address",
        "PYHVD_METRICS_ADDRESS",
        _text,
        "ADDRESS",
        "serve metrics on this address (default: 127.0.0.1)",
    ),
    Setting("params.hierarchical_allreduce", "PYHVD_HIERARCHICAL_ALLREDUCE", _switch),
    Setting("params.hierarchical_allgather", "PYHVD_HIERARCHICAL_ALLGATHER", _switch),
    Setting("params.torus_allreduce", "PYHVD_TORUS_ALLREDUCE", _switch),
    Setting(
        "timeline.filename",
        "PYHVD_TIMELINE",
        _text,
        "PATH",
        "record each rank's timeline: rank 0 to PATH, the others beside it (a directory: all into it)",
    ),
    Setting(
        "timeline.mark_cycles",
        "PYHVD_TIMELINE_MARK_CYCLES",
        _switch,
        "",
        "mark in the timeline when a response list arrives (default: no)",
    ),
    Setting(
        "stall_check.enabled",
        "PYHVD_STALL_CHECK_DISABLE",
        _opposite,
        "",
        "look for stalled tensors (default: yes)",
    ),
    Setting(
        "stall_check.warning_time_seconds",
        "PYHVD_STALL_CHECK_TIME_SECONDS",
        _number,
        "S",
        "report tensors that some ranks have not submitted after S seconds (default: 60)",
    ),
    Setting(
        "stall_check.shutdown_time_seconds",
        "PYHVD_STALL_SHUTDOWN_TIME_SECONDS",
        _number,
        "S",
        "end the job with an error if tensors have stalled for S seconds (default: 0, never)",
    ),
    Setting("library_options.mpi_threads_disable", "PYHVD_MPI_THREADS_DISABLE", _switch),
    Setting("library_options.num_nccl_streams", "PYHVD_NUM_NCCL_STREAMS", _whole),
    Setting("library_options.thread_affinity", "PYHVD_THREAD_AFFINITY", str),
    Setting("library_options.gloo_timeout_seconds", "PYHVD_GLOO_TIMEOUT_SECONDS", _number),
    Setting("logging.level", "PYHVD_LOG_LEVEL", _text),
    Setting("logging.with_timestamp", "PYHVD_LOG_HIDE_TIME", _opposite),
    Setting("controller", "PYHVD_CONTROLLER", _text),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the table, and ``--config-file``, to a parser."""
    parser.add_argument(
        "--config-file", metavar="FILE", help="read settings from a YAML file; flags override it"
    )
    for setting in SETTINGS:
        if setting.help and setting.takes:
            parser.add_argument(
                setting.flag,
                dest=setting.variable,
                type=_checked(setting.convert),
                metavar=setting.takes,
                help=setting.help,
            )
        elif setting.help:
            parser.add_argument(
                setting.flag, dest=setting.variable, action=argparse.BooleanOptionalAction, help=setting.help
            )


def settings_of(known: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the flags and the config file set.

    Raises
    ------
    ConfigFileError
        The file cannot be read, or an entry is unknown or has a wrong value.
    """
    asked = {} if known.config_file is None else read_config_file(known.config_file)
    for setting in SETTINGS:
        value = getattr(known, setting.variable, None)
        if value is not None:
            asked[setting.variable] = value if setting.takes else setting.convert(value)
    return asked


def read_config_file(path: str) -> dict[str, str]:
    """Return the variables that a config file sets; raise ConfigFileError if it is invalid."""
    try:
        import yaml
    except ImportError:
        raise ConfigFileError('--config-file needs PyYAML: pip install "pyhvd[cli]"') from None
    try:
        with open(path, encoding="utf-8") as file:
            sections = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigFileError(f"cannot read {path}: {exc}") from None
    table = {setting.entry: setting for setting in SETTINGS}
    asked = {}
    for entry, value in _entries(path, sections, table):
        if entry not in table:
            raise ConfigFileError(
                f"{path}: {entry} is not a setting; the settings are {', '.join(sorted(table))}"
            )
        try:
            asked[table[entry].variable] = table[entry].convert(value)
        except ValueError as exc:
            raise ConfigFileError(f"{path}: {entry}: {value!r}: {exc}") from None
    return asked


def _entries(path: str, sections: Any, known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config file, whose sections may be empty."""
    if not isinstance(sections, dict):
        raise ConfigFileError(f"{path}: expected sections with entries")
    for section, entries in sections.items():
        if section in known:
            yield section, entries
        elif isinstance(entries, dict):
            yield from ((f"{section}.{key}", value) for key, value in entries.items())
        elif entries is not None:
            raise ConfigFileError(f"{path}: expected sections with entries, not {section}: {entries!r}")


def _checked(convert: Callable[[Any], str]) -> Callable[[str], str]:
    def checked(text: str) -> str:
        try:
            return convert(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{exc}, not {text!r}") from None

    return checked
