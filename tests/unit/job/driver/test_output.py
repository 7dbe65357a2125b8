"""The output of ranks on the driver: whole lines, and no wait for a slow reader."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyhvd.job.driver.output import Output

PATIENCE_S = 30.0


def test_output_is_shown_by_whole_lines() -> None:
    out, err = io.StringIO(), io.StringIO()
    with Output(out, err) as output:
        output.write(0, 1, b"one\ntw")
        output.write(1, 1, "ü\n".encode())
        output.write(0, 1, b"o\nrest")
        output.write(0, 2, b"\xff\n")
    assert out.getvalue() == "[0]<stdout>:one\n[1]<stdout>:ü\n[0]<stdout>:two\n[0]<stdout>:rest\n"
    assert err.getvalue() == "[0]<stderr>:\ufffd\n"


def test_quiet_output_has_stderr_only_and_all_of_it_counts_as_shown() -> None:
    out, err = io.StringIO(), io.StringIO()
    with Output(out, err, quiet=True) as output:
        output.write(3, 1, b"one\n")
        output.write(0, 2, b"two\n")
        assert wait_for_shown(output, 8) == {3: 4, 0: 4}
    assert (out.getvalue(), err.getvalue()) == ("", "[0]<stderr>:two\n")


def wait_for_shown(output: Output, count: int) -> dict[int, int]:
    shown: dict[int, int] = {}
    while sum(shown.values()) < count:
        assert select.select([output], [], [], PATIENCE_S)[0]
        for rank, more in output.take_shown().items():
            shown[rank] = shown.get(rank, 0) + more
    return shown


class Reader:
    """A pipe that is read only after begin()."""

    def __init__(self) -> None:
        self._from, to = os.pipe()
        self.file = open(to, "w", encoding="utf-8")  # noqa: SIM115
        self.text = ""
        self._thread = threading.Thread(target=self._read)

    def begin(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        with open(self._from, encoding="utf-8") as file:
            self.text = file.read()

    def end(self) -> str:
        self.file.close()
        self._thread.join(PATIENCE_S)
        return self.text


def test_nobody_waits_for_a_reader_and_the_end_waits_as_long_as_it_reads() -> None:
    reader = Reader()
    lines = [f"{number:0100d}" for number in range(20_000)]  # 2 MB; a pipe holds 64 KiB
    with Output(reader.file) as output:
        for first in range(0, len(lines), 100):
            output.write(0, 1, "".join(f"{line}\n" for line in lines[first : first + 100]).encode())
        shown = sum(output.take_shown().values())
        assert shown < 200_000
        reader.begin()
    assert reader.end().splitlines() == [f"[0]<stdout>:{line}" for line in lines]


def test_the_end_gives_up_a_reader_that_stands_still_and_what_is_left_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = Reader()
    output = Output(reader.file)

    def fail() -> None:
        with output:
            output.write(0, 1, (b"x" * 99 + b"\n") * 2000)
            raise KeyError("the first error")

    with pytest.raises(KeyError, match="the first error"):
        fail()
    assert "nobody has read any of it for 1 s" in caplog.text
    reader.begin()
    output._thread.join(PATIENCE_S)
    assert reader.end().splitlines() == ["[0]<stdout>:" + "x" * 99] * 2000


_SCRIPT = """
import os, signal, sys
from pyhvd.job.driver import output

signal.signal(signal.SIGINT, signal.default_int_handler)
output._PATIENCE_S = 0.2
with output.Output() as out:
    for _ in range(4):
        out.write(0, 1, (b"y" * 79 + b"\\n") * 1000)
os.write(int(sys.argv[1]), b".")
"""


@contextmanager
def script_at_its_end(options: list[str], stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a script that has reached its end with 4,000 lines of output that nobody has read."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    told, tell = os.pipe()
    with subprocess.Popen(
        [sys.executable, *options, "-c", _SCRIPT, str(tell)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        pass_fds=[tell],
    ) as process:
        os.close(tell)
        assert select.select([told], [], [], PATIENCE_S)[0]
        assert os.read(told, 1) == b"."
        os.close(told)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        yield process
        process.kill()


BUFFERED = pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])


@BUFFERED
def test_the_end_of_the_process_waits_for_who_reads_the_rest(options: list[str]) -> None:
    with script_at_its_end(options) as script:
        out, err = script.communicate(timeout=PATIENCE_S)
    assert out.splitlines() == [b"[0]<stdout>:" + b"y" * 79] * 4000
    assert (script.returncode, err) == (0, b"")


@BUFFERED
def test_the_end_of_the_process_does_not_wait_when_the_reader_has_ended(options: list[str]) -> None:
    with script_at_its_end(options) as script:
        assert script.stdout is not None
        script.stdout.close()
        script.wait(PATIENCE_S)
        assert script.stderr is not None
        assert b"the ranks' stdout is no longer shown: BrokenPipeError" in script.stderr.read()


@BUFFERED
def test_the_end_of_the_process_does_not_wait_after_ctrl_c(options: list[str]) -> None:
    with script_at_its_end(options) as script:
        script.send_signal(signal.SIGINT)
        assert script.wait(PATIENCE_S) == 0
        assert script.stderr is not None
        assert script.stderr.read() == b"the rest of the ranks' output is not shown: interrupted\n"


@BUFFERED
def test_ctrl_c_does_not_wait_for_who_does_not_read_both(options: list[str]) -> None:
    with script_at_its_end(options, subprocess.STDOUT) as script:
        script.send_signal(signal.SIGINT)
        assert script.wait(PATIENCE_S) == 0


def test_a_file_that_is_broken_is_left_out_and_the_other_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    receive, send = os.pipe()
    os.close(receive)
    err = io.StringIO()
    out = os.fdopen(send, "w", buffering=1 << 20)
    with Output(out, err) as output:
        output.write(0, 1, b"one\n")
        output.write(0, 1, b"two\n")
        output.write(0, 2, b"three\n")
        assert wait_for_shown(output, 14) == {0: 14}
    assert err.getvalue() == "[0]<stderr>:three\n"
    assert caplog.text.count("the ranks' stdout is no longer shown: BrokenPipeError") == 1
    with pytest.raises(BrokenPipeError):
        out.close()


class Unwritable(io.StringIO):
    """A file whose writes raise an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Unspeakable()])
def test_whatever_a_file_raises_all_counts_as_shown(error: BaseException) -> None:
    err = io.StringIO()
    with Output(Unwritable(error), err) as output:
        output.write(0, 1, b"one\n")
        output.write(1, 1, b"two\n")
        output.write(0, 2, b"three\n")
        assert wait_for_shown(output, 14) == {0: 10, 1: 4}
    assert err.getvalue() == "[0]<stderr>:three\n"


def test_a_warning_that_fails_takes_nothing_from_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the log is broken too")

    monkeypatch.setattr("pyhvd.job.driver.output._log", SimpleNamespace(warning=fail))
    err = io.StringIO()
    with Output(Unwritable(OSError("no space left")), err) as output:
        output.write(0, 1, b"one\n")
        output.write(0, 2, b"two\n")
        assert wait_for_shown(output, 8) == {0: 8}
    assert err.getvalue() == "[0]<stderr>:two\n"


def test_characters_that_a_file_does_not_have(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file, Output(file) as output:
        output.write(0, 1, "für\n".encode())
    assert (tmp_path / "out").read_text() == "[0]<stdout>:f\\xfcr\n"


def test_a_line_that_has_begun_is_shown_and_its_rest_follows() -> None:
    out = io.StringIO()
    with Output(out, out) as output:
        output.write(0, 1, b"Name: ")
        until = time.monotonic() + PATIENCE_S
        while not out.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        assert out.getvalue() == "[0]<stdout>:Name: "
        output.write(0, 1, b"x\n")
    assert out.getvalue() == "[0]<stdout>:Name: x\n"


def test_only_the_ranks_that_are_asked_for_are_shown_and_all_counts() -> None:
    out = io.StringIO()
    with Output(out, out, ranks={1}) as output:
        output.write(0, 1, b"zero\n")
        output.write(1, 1, b"one\n")
        assert wait_for_shown(output, 9) == {0: 5, 1: 4}
    assert out.getvalue() == "[1]<stdout>:one\n"


def test_bytes_that_are_no_utf_8_pass_unchanged() -> None:
    script = (
        "from pyhvd.job.driver.output import Output\nwith Output() as out: out.write(0, 1, b'\\xff\\xfc\\n')"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, check=True)
    assert ended.stdout == b"[0]<stdout>:\xff\xfc\n"
