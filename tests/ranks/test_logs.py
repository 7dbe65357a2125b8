"""Test the pyhvd logger: each record's rank, the logging ranks, the handlers, and the level."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest

import pyhvd as hvd
from pyhvd.api import logs
from pyhvd.config import Config
from pyhvd.testing import run_ranks

LOGGER = logging.getLogger("pyhvd")


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger in the state of a fresh process, under a root logger without pytest's handlers."""
    fresh = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(LOGGER, "parent", fresh)
    monkeypatch.setattr(logs, "_level_set", logging.NOTSET)
    before = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers), list(LOGGER.filters)
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.propagate, LOGGER.handlers, LOGGER.filters = True, [], []
    yield fresh
    LOGGER.setLevel(before[0])
    LOGGER.propagate, LOGGER.handlers, LOGGER.filters = before[1:]


class _Stderr:
    """The text written to stderr so far."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self._read = ""

    def getvalue(self) -> str:
        self._read += self._capture.readouterr().err
        return self._read


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> _Stderr:
    return _Stderr(capsys)


def _say_everything() -> None:
    LOGGER.debug("debug")
    LOGGER.info("info")
    LOGGER.warning("warning")


def _lines(size: int, **knobs: object) -> None:
    run_ranks(size, _say_everything, knobs={"log_hide_time": True, **knobs})


def test_each_rank_that_is_a_thread_has_its_number(stderr: _Stderr) -> None:
    _lines(3)
    assert sorted(stderr.getvalue().splitlines()) == [f"pyhvd[{rank}] WARNING: warning" for rank in range(3)]


def test_info_comes_from_rank_0_alone(stderr: _Stderr) -> None:
    _lines(3, log_level="info", fast_lane=False)
    said = sorted(line for line in stderr.getvalue().splitlines() if "INFO" in line)
    assert said == [
        "pyhvd[0] INFO: info",
        f"pyhvd[0] INFO: pyhvd {hvd.__version__} is up: 3 ranks, 3 of them on this node;"
        " the fast lane is off",
    ]
    assert stderr.getvalue().count("WARNING: warning") == 3


@pytest.mark.parametrize("level", ["debug", "trace"])
def test_every_rank_debugs(level: str, stderr: _Stderr) -> None:
    _lines(2, log_level=level)
    lines = stderr.getvalue().splitlines()
    assert "pyhvd[0] DEBUG: debug" in lines
    assert "pyhvd[1] DEBUG: debug" in lines


@pytest.mark.parametrize(("level", "heard"), [("error", "ERROR CRITICAL"), ("fatal", "CRITICAL")])
def test_high_levels(level: str, heard: str, stderr: _Stderr) -> None:
    def body() -> None:
        LOGGER.warning("w")
        LOGGER.error("e")
        LOGGER.critical("c")

    run_ranks(1, body, knobs={"log_level": level, "log_hide_time": True})
    assert [line.split()[1].rstrip(":") for line in stderr.getvalue().splitlines()] == heard.split()


def test_the_clock_is_shown_unless_hidden(stderr: _Stderr) -> None:
    run_ranks(1, _say_everything)
    (line,) = stderr.getvalue().splitlines()
    assert line.endswith(" pyhvd[0] WARNING: warning")
    assert line[:2] == "20"


def test_a_callback_on_the_background_thread_has_its_rank(stderr: _Stderr) -> None:
    def body() -> None:
        told = threading.Event()

        def callback(_: object) -> None:
            LOGGER.warning("from %s", threading.current_thread().name)
            told.set()

        hvd.allreduce_async(1.0).add_done_callback(callback)
        assert told.wait(10)
        hvd.barrier()

    run_ranks(2, body, knobs={"log_hide_time": True})
    lines = stderr.getvalue().splitlines()
    assert len(lines) == 2
    for rank in (0, 1):
        (line,) = [line for line in lines if line.startswith(f"pyhvd[{rank}]")]
        assert line.endswith((f"pyhvd-{rank}", f"rank-{rank}"))


@pytest.mark.parametrize("where", ["pyhvd", "root"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_handlers_of_the_program_get_each_record_once(
    where: str, when: str, stderr: _Stderr, root: logging.Logger
) -> None:
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    handler.setFormatter(logging.Formatter("%(pyhvd_rank)s|%(levelname)s|%(message)s"))
    logger = root if where == "root" else LOGGER
    if when == "before":
        logger.addHandler(handler)

    def body() -> None:
        hvd.barrier()
        if hvd.rank() == 0 and when == "after":
            logger.addHandler(handler)
        hvd.barrier()
        LOGGER.warning("hello")

    run_ranks(2, body)
    assert sorted(heard.getvalue().splitlines()) == ["0|WARNING|hello", "1|WARNING|hello"]
    assert stderr.getvalue() == ""
    assert root.handlers == ([handler] if where == "root" else []), "the root is left alone"


def test_a_logger_cut_off_from_the_root_still_speaks(stderr: _Stderr, root: logging.Logger) -> None:
    root.addHandler(logging.NullHandler())
    LOGGER.propagate = False
    _lines(1)
    assert stderr.getvalue() == "pyhvd[0] WARNING: warning\n"


def test_two_inits_do_not_speak_twice(stderr: _Stderr) -> None:
    def body() -> None:
        hvd.shutdown()
        hvd.init()
        LOGGER.warning("once")

    run_ranks(1, body, knobs={"log_hide_time": True})
    assert stderr.getvalue() == "pyhvd[0] WARNING: once\n"


def test_foreign_records_get_the_rank_from_the_filter(stderr: _Stderr) -> None:
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    handler.addFilter(logs.RankFilter())
    handler.setFormatter(logging.Formatter("%(pyhvd_rank)s %(name)s"))
    logging.getLogger("train").addHandler(handler)
    run_ranks(1, lambda: logging.getLogger("train").warning("x"))
    logging.getLogger("train").warning("nobody's rank")
    assert heard.getvalue().splitlines() == ["0 train", "- train"]


def test_a_level_of_the_programs_own_stays() -> None:
    LOGGER.setLevel(logging.ERROR)
    logs.set_up(Config())
    assert LOGGER.level == logging.ERROR
    logs.set_up(Config(log_level="debug"))
    assert LOGGER.level == logging.DEBUG, "asked for by name"
    logs.set_up(Config())
    assert LOGGER.level == logging.WARNING, "what an earlier init() has set is not the program's own"
