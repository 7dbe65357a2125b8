"""Configuration: one typed, documented dataclass; the environment overrides its defaults.

Owns: the list of knobs, their defaults, parsing, texts, and entries in config files. Knows nothing of MPI or
of ranks. Each knob's variable is ``PYHVD_<suffix>``. If it is not set, ``HOROVOD_<suffix>`` is read, with one
notice.
A value that cannot be parsed is an error that names the variable; it is never read as zero.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyhvd.common.tables import align
from pyhvd.common.urls import local_path
from pyhvd.errors import ConfigError

_PREFIXES = ("PYHVD_", "HOROVOD_")
_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off", ""))
# Sizes and counts are added up in 64 bits.
_MOST = 1 << 60
# Seconds; a thread cannot wait longer than some thirty years.
_LONGEST = 1e9
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("expected one of 1, 0, true, false, yes, no, on, off")


def _whole(text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("expected a whole number, in digits alone") from None
    if value < least:
        raise ValueError(f"expected a number >= {least}")
    if value > most:
        raise ValueError(f"expected a number <= {most}")
    return value


_count = functools.partial(_whole, least=0, most=_MOST)
_positive = functools.partial(_whole, least=1, most=_MOST)


def _chunk(text: str) -> int:
    value = _whole(text, 16384, 1 << 40)
    if value % 128:
        raise ValueError("expected a multiple of 128")
    return value


def _port(text: str) -> int | None:
    return _whole(text, 0, (1 << 16) - 1) if text.strip() else None


def port_range(text: str) -> range:
    """Return the ports of a range such as ``40000-40999``; for an empty text 0, which stands for any port.

    Raises
    ------
    ValueError
        The text is no range of ports.
    """
    if not text.strip():
        return range(1)
    first, dash, last = (part.strip() for part in text.partition("-"))
    if not (dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise ValueError("expected two ports, such as 40000-40999")
    return range(int(first), int(last) + 1)


def _ports(text: str) -> str:
    ports = port_range(text)
    return f"{ports[0]}-{ports[-1]}" if ports[0] else ""


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError("expected a finite number >= 0")
    if value > _LONGEST:
        raise ValueError(f"expected a number <= {_LONGEST:g}")
    return value


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text that UTF-8 can encode") from None
    return text


def _path(text: str) -> str:
    return local_path(_text(text))


def _one_of(text: str, words: Sequence[str]) -> str:
    word = text.strip().lower()
    if word not in words:
        raise ValueError(f"expected one of {', '.join(words)}")
    return word


_log_level = functools.partial(_one_of, words=LOG_LEVELS)
_carrier = functools.partial(_one_of, words=("auto", "tcp", "mpi"))
_fused_by = functools.partial(_one_of, words=("time", "call"))
_waits_by = functools.partial(_one_of, words=("stream", "host"))


_CHECKS = ("results", "finite")


def _checks(text: str) -> str:
    word = text.strip().lower()
    if word in _FALSE:
        return "off"
    if word in _TRUE:
        return "results"
    asked = {part.strip() for part in word.split(",")}
    if not asked <= set(_CHECKS):
        raise ValueError("expected 0, 1, results, finite or results,finite")
    return ",".join(check for check in _CHECKS if check in asked)


_Parse = Callable[[str], Any]
_KINDS: dict[type, tuple[type, str, _Parse]] = {
    bool: (bool, "True or False", _bool),
    int: (numbers.Integral, "a whole number", _count),
    float: (numbers.Real, "a number", _duration),
    str: (str, "a string", _text),
}
"""By type of knob: the values that it takes, a word for them, and what parses its variable."""


def _checked(knob: dataclasses.Field[Any], value: Any) -> Any:
    """Return a knob's value in its own type and spelling; check it as its variable is checked."""
    optional = knob.default is None
    if value is None and optional:
        return None
    kind = int if optional else type(knob.default)
    allowed, expected, _ = _KINDS[kind]
    try:
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"expected {expected}" + " or None" * optional)
        return knob.metadata["parse"](str(value))
    except ValueError as exc:
        raise ConfigError(f"{knob.name}={reprlib.repr(value)}: {exc}") from None


class ConfigEntry(NamedTuple):
    """How a config file and a flag set a variable; :mod:`pyhvd.run.flags` derives both.

    Attributes
    ----------
    name : str
        Section and key in the config file.
    takes : str
        The flag's argument in ``--help``; empty for a switch.
    scale : int
        The unit of the entry, in that of the variable.
    opposite : bool
        Whether the switch turns the variable off.
    """

    name: str
    takes: str = ""
    scale: int = 1
    opposite: bool = False


def _knob(
    default: Any, doc: str, entry: ConfigEntry | None = None, *, shared: bool, parse: _Parse | None = None
) -> Any:
    parse = parse or _KINDS[type(default)][2]
    return field(default=default, metadata={"parse": parse, "doc": doc, "entry": entry, "shared": shared})


_own = functools.partial(_knob, shared=False)
_shared = functools.partial(_knob, shared=True)


def suffix_of(knob: dataclasses.Field[Any]) -> str:
    """Return the part of a knob's variable after the prefix: the knob's name, without its unit ``_ms``."""
    return knob.name.removesuffix("_ms").upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every knob of one rank's runtime; ``describe()`` returns the table.

    All ranks use rank 0's value of the knobs in ``pyhvd.config.SHARED``. A rank with another value logs one
    warning.
    """

    fusion_threshold: int = _shared(
        128 * 1024 * 1024,
        "most bytes that are fused into one response; 0: no fusion",
        ConfigEntry("params.fusion_threshold_mb", "MB", scale=1 << 20),
    )
    cycle_time_ms: float = _own(
        1.0,
        "longest time (ms) that submissions gather while no thread waits",
        ConfigEntry("params.cycle_time_ms", "MS"),
    )
    chunk_size: int = _shared(
        256 * 1024,
        "bytes of one chunk of the shared-memory pipeline; a rank has three per process set, or four larger"
        " ones on several hosts",
        parse=_chunk,
    )
    staging_size: int = _shared(
        4 * 1024 * 1024,
        "bytes of one piece of a tensor that goes through MPI, or is scattered",
        parse=_positive,
    )
    cache_capacity: int = _shared(
        4096,
        "responses remembered per process set (the fast lane: at most 65,536); 0: no response cache",
        ConfigEntry("params.cache_capacity", "N"),
    )
    pool_size: int = _own(
        256 * 1024 * 1024,
        "most bytes of freed results in host memory that a process keeps for later ones; 0: none",
        parse=_count,
    )
    disable_group_fusion: bool = _shared(False, "a grouped call's tensors are fused only with each other")
    device_fusion: str = _shared(
        "time",
        "on GPUs, time: single tensors that are ready together are fused; call: only one call's tensors",
        parse=_fused_by,
    )
    device_wait: str = _shared(
        "stream",
        "stream: the stream that is current in `result()` waits for a device's work; host: the thread, too",
        parse=_waits_by,
    )
    dynamic_process_sets: bool = _shared(False, "add_process_set and remove_process_set are allowed")
    stall_check_disable: bool = _shared(
        False, "no warnings about stalled tensors", ConfigEntry("stall_check.enabled", opposite=True)
    )
    stall_check_time_seconds: float = _shared(
        60.0,
        "report a tensor that some ranks have not submitted after this time (s)",
        ConfigEntry("stall_check.warning_time_seconds", "S"),
    )
    stall_shutdown_time_seconds: float = _shared(
        0.0,
        "end the job after this time (s) with such a tensor; 0: never",
        ConfigEntry("stall_check.shutdown_time_seconds", "S"),
    )
    autotune: bool = _shared(
        False,
        "search for the best fusion threshold, cycle time and chunk size",
        ConfigEntry("autotune.enabled"),
    )
    autotune_log: str = _own(
        "",
        "CSV file in which rank 0 records the search",
        ConfigEntry("autotune.log_file", "FILE"),
        parse=_path,
    )
    autotune_warmup_samples: int = _own(
        3, "samples to discard before the search", ConfigEntry("autotune.warmup_samples", "N")
    )
    autotune_steps_per_sample: int = _own(
        10,
        "steps of the program that make a sample",
        ConfigEntry("autotune.steps_per_sample", "N"),
        parse=_positive,
    )
    mpi_threads_disable: bool = _own(
        False,
        "ask MPI for THREAD_SERIALIZED; the program itself must then not use MPI",
        ConfigEntry("library_options.mpi_threads_disable"),
    )
    allow_alone: bool = _own(
        False, "init() takes a single rank, though its launcher has started more processes"
    )
    fast_lane: bool = _shared(
        True, "ranks on one node agree and reduce through shared memory; off: through MPI"
    )
    links: bool = _shared(
        True, "ranks on several hosts exchange data over connections of their own; off: through MPI"
    )
    link_interfaces: str = _shared(
        "", "interfaces, addresses or subnets (with commas) for links between hosts; empty: any"
    )
    link_ports: str = _shared(
        "", "the ports on which ranks listen while links are made, as 40000-40999; empty: any", parse=_ports
    )
    link_carrier: str = _shared(
        "auto",
        "tcp or mpi carries the data of links; auto: tcp, and with RDMA on all hosts the much faster one",
        parse=_carrier,
    )
    graph_wait_ms: float = _own(
        50.0,
        "longest time (ms) for which a collective of a compiled graph waits for its result before the graph's"
        " thread goes on; 0: never",
    )
    graph_ops: str = _own(
        "auto",
        "callback: compiled graphs run collectives through Python; auto: in C++, where that works",
        parse=functools.partial(_one_of, words=("auto", "callback")),
    )
    timeline: str = _shared(
        "",
        "record to this file or directory from the start; DYNAMIC: from start_timeline() on",
        ConfigEntry("timeline.filename", "PATH"),
        parse=_path,
    )
    timeline_mark_cycles: bool = _shared(
        False, "a timeline recorded from the start marks its cycles", ConfigEntry("timeline.mark_cycles")
    )
    check: str = _shared(
        "off",
        "1 or results: compare the ranks' results; finite: warn of NaN and infinity; results,finite: both",
        parse=_checks,
    )
    metrics_port: int | None = _own(
        None,
        "measure times, and serve metrics for Prometheus on this port + the local rank; 0: any free port;"
        " unset: no server",
        ConfigEntry("metrics.port", "PORT"),
        parse=_port,
    )
    metrics_address: str = _own(
        "127.0.0.1",
        "the address to serve metrics on; 0.0.0.0: all",
        ConfigEntry("metrics.address", "ADDRESS"),
        parse=str.strip,
    )
    metrics_targets: str = _own(
        "",
        "folder in which each rank that serves metrics writes its address, for Prometheus's file_sd",
        ConfigEntry("metrics.targets", "DIR"),
        parse=_path,
    )
    log_level: str = _own(
        "warning",
        f"level of the 'pyhvd' logger: {', '.join(LOG_LEVELS)}",
        ConfigEntry("logging.level", "LEVEL"),
        parse=_log_level,
    )
    log_hide_time: bool = _own(
        False, "no clock in log lines", ConfigEntry("logging.with_timestamp", opposite=True)
    )
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of the knobs that the environment or the caller has set; autotuning does not change them."""
    borrowed: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The variables with Horovod's prefix that gave a knob's value."""

    def __post_init__(self) -> None:
        """Check every field as its variable is checked; a ConfigError names the field."""
        for knob in self.knobs():
            object.__setattr__(self, knob.name, _checked(knob, getattr(self, knob.name)))
        warn, end = self.stall_check_time_seconds, self.stall_shutdown_time_seconds
        if 0 < end < warn:
            raise ConfigError(
                self.users_words(
                    f"PYHVD_STALL_SHUTDOWN_TIME_SECONDS={end:g} is less than"
                    f" PYHVD_STALL_CHECK_TIME_SECONDS={warn:g}: the job would end before the warning"
                )
            )

    def users_words(self, text: str) -> str:
        """Return a text with the variables that the user has set, in place of pyhvd's own names of them."""

        def named(found: re.Match[str]) -> str:
            other = "HOROVOD_" + found[1]
            return other if other in self.borrowed else found[0]

        return re.sub(r"\bPYHVD_(\w+)", named, text)

    @classmethod
    def knobs(cls) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields that are knobs, in the order of the table."""
        return tuple(each for each in dataclasses.fields(cls) if each.metadata)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> tuple[Config, list[str]]:
        """Return the configuration that the environment gives.

        Parameters
        ----------
        env : mapping of str to str, optional
            Defaults to ``os.environ``.
        **overrides
            Values that override the environment.

        Returns
        -------
        (Config, list of str)
            The configuration, and notices for one rank to log.

        Raises
        ------
        ConfigError
            A value cannot be used; the text names the variable or field, the value and what is expected.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        borrowed: list[str] = []
        for knob in cls.knobs():
            for prefix in _PREFIXES:
                variable = prefix + suffix_of(knob)
                if variable in env:
                    try:
                        values[knob.name] = knob.metadata["parse"](env[variable])
                    except ValueError as exc:
                        raise ConfigError(f"{variable}={env[variable]!r}: {exc}") from None
                    if prefix == "HOROVOD_":
                        borrowed.append(variable)
                    break
        values.update(overrides)
        config = cls(**values, given=frozenset(values), borrowed=tuple(borrowed))
        notices = []
        if borrowed:
            notices.append(f"read {', '.join(borrowed)}; pyhvd's own names are PYHVD_<same suffix>")
        ignored = [p + s for s in WITHOUT_EFFECT for p in _PREFIXES if p + s in env]
        if ignored:
            notices.append(f"this version of pyhvd does not act on {', '.join(ignored)}")
        if config.autotune_log and not config.autotune:
            notices.append(config.users_words("PYHVD_AUTOTUNE_LOG has no effect without PYHVD_AUTOTUNE=1"))
        if config.metrics_targets and config.metrics_port is None:
            alone = "PYHVD_METRICS_TARGETS has no effect without PYHVD_METRICS_PORT, such as 0"
            notices.append(config.users_words(alone))
        return config, notices

    @classmethod
    def describe(cls) -> str:
        """Return the table of knobs: variable, default, meaning."""
        rows = [(f"PYHVD_{suffix_of(k)}", str(k.default), k.metadata["doc"]) for k in cls.knobs()]
        return "\n".join(align(rows, left=3))


SHARED = tuple(knob.name for knob in Config.knobs() if knob.metadata["shared"])
"""Knobs that must be the same on every rank; rank 0's values count."""

WITHOUT_EFFECT: dict[str, ConfigEntry | None] = {
    "ADASUM_MPI_CHUNK_SIZE": None,
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ConfigEntry("autotune.bayes_opt_max_samples", "N"),
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": ConfigEntry("autotune.gaussian_process_noise", "X"),
    "BATCH_D2D_MEMCOPIES": None,
    "CCL_BGT_AFFINITY": None,
    "CCL_CACHE": None,
    "CONTROLLER": ConfigEntry("controller", "NAME"),
    "CPU_OPERATIONS": None,
    "DISABLE_NVTX_RANGES": None,
    "ENABLE_ASYNC_COMPLETION": None,
    "ENABLE_XLA_OPS": None,
    "GLOO_IFACE": None,
    "GLOO_TIMEOUT_SECONDS": ConfigEntry("library_options.gloo_timeout_seconds", "S"),
    "HIERARCHICAL_ALLGATHER": ConfigEntry("params.hierarchical_allgather"),
    "HIERARCHICAL_ALLREDUCE": ConfigEntry("params.hierarchical_allreduce"),
    "NUM_NCCL_STREAMS": ConfigEntry("library_options.num_nccl_streams", "N"),
    "THREAD_AFFINITY": ConfigEntry("library_options.thread_affinity", "CORES"),
    "TORUS_ALLREDUCE": ConfigEntry("params.torus_allreduce"),
}
"""Suffixes of variables that Horovod reads and pyhvd does not, with their entries."""


_OF_LAUNCHERS = (
    "DRIVER_TIMEOUT",
    "ELASTIC_TIMEOUT",
    "START_TIMEOUT",
    "SPARK_START_TIMEOUT",
    "SPARK_USE_LOCAL_RANK_GPU_INDEX",
)


def read_timeout(suffix: str, default: float, env: Mapping[str, str] | None = None) -> float:
    """Return a time of launchers (s) by the suffix of its variable; the default if the variable is not set.

    Raises
    ------
    ConfigError
        The value is no number above 0.
    """
    env = os.environ if env is None else env
    variable = next((prefix + suffix for prefix in _PREFIXES if prefix + suffix in env), None)
    if variable is None:
        return default
    try:
        value = _duration(env[variable])
    except ValueError:
        value = 0.0
    if not value:
        raise ConfigError(f"{variable}={env[variable]!r}: expected a number of seconds above 0")
    return value


def known_variables() -> set[str]:
    """Return the variables that pyhvd reads or knows from Horovod, under both prefixes."""
    suffixes = {*map(suffix_of, Config.knobs()), *WITHOUT_EFFECT, *_OF_LAUNCHERS}
    return {prefix + suffix for prefix in _PREFIXES for suffix in suffixes}
