"""What a report says of a rank that a signal killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyhvd.job.process.crash import describe_crash
from pyhvd.job.process.exit_report import SIGNAL, describe_unreported
from pyhvd.job.process.rank_line import CRASH, TENTATIVE, UP, RankLine, tell, tell_crashes

_UCX = b"""working
[vm:4711 :0:4712] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x10)
==== backtrace (tid:   4712) ====
 0  /lib/libucs.so.0(ucs_handle_error+0x294) [0x7f624aebc2d4]
 9  /lib/libmpi.so.12(+0x15aacd) [0x7f624775aacd]
10  /lib/libmpi.so.12(MPI_Send_c+0x365) [0x7f624775d085]
11  /lib/mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so(+0x1152b9) [0x7f624748d2b9]
"""
_UCX_LINE = "Caught signal 11 (Segmentation fault: address not mapped to object at address 0x10)"
_OPEN_MPI = b"""[vm:04711] *** Process received signal ***
[vm:04711] Signal: Segmentation fault (11)
[vm:04711] Signal code: Address not mapped (1)
[vm:04711] Failing at address: 0x10
[vm:04711] [ 3] /lib/libmpi.so.40(mca_pml_ob1_send+0x28a)[0x7f98741da]
[vm:04711] [11] /lib/libmpi.so.40(PMPI_Send+0x15a)[0x7fccf96d0a7a]
"""


@pytest.mark.parametrize(
    ("stderr", "quoted"),
    [
        (_UCX, f"in MPI_Send: {_UCX_LINE}"),
        (_UCX.replace(b"libmpi.so.12(MPI_Send_c+0x365)", b"0x7f MPI_Send()"), f"in MPI_Send: {_UCX_LINE}"),
        (_UCX.partition(b"10  ")[0], _UCX_LINE),
        (_OPEN_MPI, "in MPI_Send: Signal: Segmentation fault (11); Failing at address: 0x10"),
        (_UCX.replace(b"4711", b"4710"), ""),  # a child's
        (_UCX.replace(b"signal 11", b"signal 7"), ""),
        (_OPEN_MPI.replace(b"(11)", b"(7)"), ""),
        (b"in MPI_Send()", ""),
    ],
)
def test_what_mpi_said_is_quoted(stderr: bytes, quoted: str) -> None:
    assert describe_crash(11, 4711, b"", stderr, "") == ("", quoted)


def test_the_innermost_line_of_the_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import x\n    comm.Send(buffer)\n")
    head = b"Fatal Python error: Segmentation fault\n\nStack (most recent call first):\n"
    stack = head + b'  File "train.py", line 2 in step\n  File "train.py", line 9 in <module>\n'
    place = "at train.py:2 in step"
    assert describe_crash(11, 1, stack, b"", str(tmp_path)) == (f"{place}: comm.Send(buffer)", "")
    assert describe_crash(11, 1, stack, b"", "/nowhere") == (place, "")
    assert describe_crash(11, 1, head + b"  <no Python frame>\n", b"", "") == ("", "")


def test_the_line_is_named_where_the_program_has_enabled_faulthandler() -> None:
    stderr = (
        b'starting\n  File "old.py", line 1 in earlier\nFatal Python error: Aborted\n\n'
        b'Thread 0x1 (most recent call first):\n  File "other.py", line 3 in wait\n\n'
        b'Current thread 0x2 (most recent call first):\n  File "/nowhere/train.py", line 2 in step\n'
    )
    assert describe_crash(6, 1, b"", stderr) == ("at /nowhere/train.py:2 in step", "")
    assert describe_crash(6, 1, b"", stderr.partition(b"Fatal")[0]) == ("", "")
    assert describe_crash(9, 1, b"", stderr) == ("", "")  # a child's, then
    assert describe_crash(6, 1, b"", stderr.replace(b"Current thread", b"Thread")) == ("", "")  # in C alone
    frame = b'  File "/nowhere/train.py", line 2 in step\n'
    in_c = stderr.replace(frame, b"  <no Python frame>\n\nThread 0x3 (most recent call first):\n" + frame)
    assert describe_crash(6, 1, b"", in_c) == ("", "")


def test_the_source_is_the_present_one(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    stack = (
        CRASH
        + f'Segmentation fault\n\nStack (most recent call first):\n  File "{program}", line 1 in f\n'.encode()
    )
    for text in ("first()", "second_now()"):
        program.write_text(text)
        assert describe_crash(11, 1, stack, b"")[0].endswith(f": {text}")


def test_a_report_has_the_line_in_place_of_the_remedy() -> None:
    report = describe_unreported(-11, "", ("at a.py:2 in f", "in MPI_Send: x"))
    assert report == (SIGNAL, 139, "was killed by SIGSEGV (signal 11) at a.py:2 in f; in MPI_Send: x")
    assert describe_unreported(-11, "")[2].endswith("(signal 11); set PYTHONFAULTHANDLER=1 to see where")
    assert describe_unreported(-9, "")[2].endswith("(signal 9); was it out of memory? (see dmesg)")


def test_a_crash_may_tear_a_message() -> None:
    line = RankLine(print, print)
    line.feed(b'["up", true]\n["report", [{"rank"Fatal Python error: ')
    line.feed(b"Bus error\n\nStack")
    assert line.up
    assert line.crash == b"Fatal Python error: Bus error\n\nStack"


def crash(kind: str, write: int) -> None:
    tell(write, UP, True)
    if kind == "caught":
        signal.signal(signal.SIGSEGV, lambda *_: None)
    if kind == "survives":
        signal.signal(signal.SIGABRT, lambda *_: None)
    tell_crashes(write)
    if kind == "survives":
        signal.raise_signal(signal.SIGABRT)
        tell(write, TENTATIVE, "told later")
        os._exit(0)
    if kind == "caught":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    if kind == "forked" and (child := os.fork()):
        os.waitpid(child, 0)
        os._exit(0)
    signal.raise_signal(signal.SIGSEGV)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is unknown who catches signals")
@pytest.mark.parametrize("kind", ["crashes", "caught", "forked", "survives"])
def test_a_crash_is_the_last_on_a_ranks_line(kind: str) -> None:
    code = (
        "import resource, sys; from tests.unit.job.process.test_crash import crash;"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); crash(sys.argv[1], int(sys.argv[2]))"
    )
    read, write = os.pipe()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    subprocess.run([sys.executable, "-c", code, kind, str(write)], pass_fds=[write], env=environ, check=False)
    os.close(write)
    line = RankLine(print, print)
    with open(read, "rb", buffering=0) as sent:
        while data := sent.read(7):
            line.feed(data)
    assert line.up
    assert (b" in crash\n" in line.crash) == (kind == "crashes")
    assert line.tentative == "told later" * (kind == "survives")
