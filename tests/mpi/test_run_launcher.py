"""The launcher: its command line, its choice of mpiexec, output files and prefixes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyhvd.job.mpi.flavour import judge_library, judge_mpiexec
from pyhvd.job.mpi.rank_env import OPENMPI
from pyhvd.job.process.exit_report import (
    EXCEPTION,
    INTERRUPT,
    LOST,
    SECONDARY,
    SIGNAL,
    ExitReport,
    is_secondary,
    root_cause,
)
from pyhvd.run.cli import _parser, parse
from tests.mpi.launch import horovodrun
from tests.mpi.run_support import (
    LIBRARY,
    MPIEXEC,
    TIMEOUT_S,
    bare,
    bare_command,
    bare_environment,
    environment,
    launcher_command,
    pyhvdrun,
    run,
    script,
    started,
)
from tests.waiting import wait_until

SPEAK = "import sys; print('to out'); print('to err', file=sys.stderr); sys.stdout.write('no newline')"


@pytest.mark.any_mpi
def test_help_has_an_example() -> None:
    ended = pyhvdrun("--help")
    assert ended.code == 0
    assert "pyhvdrun -n 4 train.py" in ended.out


@pytest.mark.any_mpi
def test_version() -> None:
    ended = pyhvdrun("--version")
    assert ended.code == 0
    assert ended.out.startswith("pyhvd ")


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "x.py"], "must be at least 1, not 0"),
        (["-n", "two", "x.py"], "-n/-np/--num-proc: expected a whole number, not 'two'"),
        (["-n", "2", "--start-timeout", "soon", "x.py"], "--start-timeout: expected a number, not 'soon'"),
        (["-n", "2", "--mpi-args", "-x 'a", "x.py"], '--mpi-args: No closing quotation: "-x \'a"'),
        (["x.py"], "the number of ranks is missing"),
        (["-n", "2"], "no script"),
        (["-n", "2", "-m"], "argument expected for the -m option"),
        (
            ["-n", "2", "python3", "-O", "train.py"],
            "after 'python3' give a script, -m module or -c code, without other options of Python",
        ),
        (["-n", "2", "-"], "stdin would reach rank 0 only"),
        (["-n", "2", "--output-filename", "hdfs:/x", "x.py"], "--output-filename: expected a local path"),
        (["-n", "2", "--timeline-filename", "s3:/b/x", "x.py"], "--timeline-filename: expected a local path"),
        (["-n", "2", "--nonsense", "x.py"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_usage(arguments: list[str], message: str) -> None:
    ended = pyhvdrun(*arguments)
    assert ended.code == 2
    assert message in ended.last


def test_options_end_where_the_program_begins() -> None:
    options = parse(["-np", "3", "--verbose", "a.py", "-n", "5"], under_mpiexec=False)
    assert (options.num_proc, options.verbose, options.program) == (3, True, ["a.py", "-n", "5"])
    assert parse(["--num-proc=3", "-mpkg.mod", "-v"], under_mpiexec=False).program == ["-m", "pkg.mod", "-v"]
    odd = parse(["-n", "1", "--", "-odd.py"], under_mpiexec=False)
    assert (odd.program, odd.rank_arguments()) == (["-odd.py"], ["--", "-odd.py"])


@pytest.mark.parametrize(
    ("given", "program"),
    [
        (["python", "train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        ([sys.executable, "-u", "train.py", "-u"], ["train.py", "-u"]),
        ([f"python3.{sys.version_info[1]}", "train.py"], ["train.py"]),
        (["python3", "-m", "mypackage.train", "x"], ["-m", "mypackage.train", "x"]),
        (["python", "-c", "print(1)"], ["-c", "print(1)"]),
        (["pythonic.py", "train.py"], ["pythonic.py", "train.py"]),
    ],
)
def test_python_before_the_program_is_left_out(given: list[str], program: list[str]) -> None:
    assert parse(["-n", "2", *given], under_mpiexec=False).program == program


@pytest.mark.parametrize("other", ["/opt/other/bin/python", "python3.5", "python2"])
def test_another_python_before_the_program_is_an_error(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["-n", "2", other, "train.py"], under_mpiexec=False)
    text = f"{other!r} is another Python than that of the ranks, {sys.executable}: leave it out"
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("where", [("-n", "2"), ("-H", "localhost:2")])
def test_a_script_whose_name_begins_with_a_dash(where: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "-evil.py").write_text("import sys; print(sys.argv)\n")
    ended = run(launcher_command(*where, "--", "-evil.py", "-x"), cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "['-evil.py', '-x']\n" * 2), ended.err


_BAD = [
    "9" * 5000,
    "-1",
    "",
    "a b",
    "é",
    "1e999",
    "nan",
    "[::",
    "h1:1,,h2",
    "0x1",
    "{",
    "{nope}",
    "%s",
]
_FLAGS = [
    each.option_strings[-1] for each in _parser()._actions if each.option_strings and each.nargs is None
]


@pytest.mark.parametrize("flag", _FLAGS)
def test_bad_values_are_errors_of_their_option(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No value ends in a traceback; those that are refused are told with the option."""
    for value in _BAD:
        with contextlib.suppress(SystemExit):
            parse(["-n", "1", flag, value, "x.py"], under_mpiexec=False)
            continue
        assert flag in capsys.readouterr().err, value


@pytest.mark.parametrize(
    ("text", "expected"),
    [("-l -x 'a b'", ["-l", "-x", "a b"]), ("-hosts h", ["-hosts", "h"]), ("-l", ["-l"])],
)
def test_arguments_for_mpiexec_may_begin_with_a_dash(text: str, expected: list[str]) -> None:
    for given in (["--mpi-args", text], [f"--mpi-args={text}"]):
        options = parse([*given, "-n1", "x", "--mpi-args", "-mine"], under_mpiexec=False)
        assert (options.mpi_args, options.program) == (expected, ["x", "--mpi-args", "-mine"])


@pytest.mark.any_mpi
def test_missing_script_is_said_once() -> None:
    ended = pyhvdrun("-n", 3, "/nowhere/script.py")
    assert ended.code == 2
    name = os.path.basename(sys.executable)
    assert ended.err == f"{name}: can't open file '/nowhere/script.py': [Errno 2] No such file or directory\n"


@pytest.mark.any_mpi
@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
def test_a_mistyped_command_is_named(tmp_path: Path, launched: bool) -> None:
    words = ("pythn", "x.py")
    command = launcher_command("-n", 2, *words) if launched else bare_command(2, *words)
    ended = run(command, bare_environment(), cwd=tmp_path)
    text = f"pyhvd: there is no Python script 'pythn' in {tmp_path}, and no command of this name"
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count(f"{text}: did you mean 'python'?\n") == 1, ended.err
    assert "Traceback" not in ended.err


@pytest.mark.any_mpi
def test_a_mistyped_command_of_horovodrun_is_named(tmp_path: Path) -> None:
    ended = run([*horovodrun(tmp_path), "-np", "2", "pythn", "x.py"], cwd=tmp_path)
    text = f"pyhvd: there is no Python script 'pythn' in {tmp_path}, and no command of this name"
    assert (ended.code, ended.out, ended.err) == (2, "", f"{text}: did you mean 'python'?\n")


CLOSED = """
import os, sys
import numpy as np, pyhvd as hvd
print("hello")
print("hello", file=sys.stderr)
assert sys.stdin.read() == ""
hvd.init()
open(f"{__file__}.{hvd.rank()}", "w").write(str(hvd.allreduce(np.ones(1), op=hvd.Sum)))
"""


@pytest.mark.any_mpi
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_as_dev_null(tmp_path: Path, closed: str) -> None:
    """cron and daemons may start pyhvdrun so; the ranks run, and what is open shows their output."""
    path = script(tmp_path, CLOSED)
    shell = shlex.join(launcher_command("-n", 2, path))
    ended = run(["sh", "-c", f"{shell} {closed}"])
    assert ended.code == 0, ended.err
    assert [Path(f"{path}.{rank}").read_text() for rank in range(2)] == ["[2.]"] * 2
    assert ended.out == ("" if ">&-" in closed.split() else "hello\n" * 2)
    assert ended.err.count("hello\n") == (0 if "2>&-" in closed else 2)
    assert "Error" not in ended.err


ON_A_TERMINAL = """
import os, pty, subprocess, sys
child, terminal = pty.fork()
if child == 0:
    group = 0 if sys.argv[1] == "background" else None
    job = subprocess.Popen(sys.argv[2:], process_group=group)
    job.wait(60)
    os._exit(0)
os.write(terminal, b"typed\\n")
text = b""
try:
    while data := os.read(terminal, 4096):
        text += data
except OSError:  # EIO: the job has ended
    pass
print(text.decode())
"""

READS = """
import sys, pyhvd as hvd
hvd.init()
if hvd.rank() == 0:
    print("rank 0 has read", repr(sys.stdin.readline()))
"""


@pytest.mark.parametrize(("place", "read"), [("background", ""), ("foreground", "typed\n")])
def test_a_job_in_the_background_does_not_take_the_shells_input(
    place: str, read: str, tmp_path: Path
) -> None:
    command = launcher_command("-n", 2, script(tmp_path, READS))
    ended = run([sys.executable, script(tmp_path, ON_A_TERMINAL, "terminal.py"), place, *command])
    assert f"rank 0 has read {read!r}" in ended.out


def test_missing_script_under_mpiexec() -> None:
    ended = bare(2, "/nowhere/script.py")
    assert ended.code == 2
    assert ended.err.count("can't open file '/nowhere/script.py'") == 1
    assert "Traceback" not in ended.err


@pytest.mark.any_mpi
def test_missing_module() -> None:
    ended = pyhvdrun("-n", 2, "-m", "nowhere_at_all")
    assert ended.code == 1
    assert "No module named nowhere_at_all" in ended.last


def test_n_under_mpiexec_is_refused(tmp_path: Path) -> None:
    ended = bare(1, "-n", 2, script(tmp_path, ""))
    assert ended.code == 2
    assert "use either mpiexec or -n, not both" in ended.err


@pytest.mark.parametrize("prefixed", [False, True])
def test_output_files(tmp_path: Path, prefixed: bool) -> None:
    folder = tmp_path / "logs"
    options = ["--prefix-output"] if prefixed else []
    ended = pyhvdrun("-n", 2, "--output-filename", folder, *options, "-c", SPEAK)
    assert ended.code == 0, ended.err
    for rank in ("0", "1"):
        assert (folder / f"rank.{rank}" / "stdout").read_text() == "to out\nno newline"
        assert (folder / f"rank.{rank}" / "stderr").read_text() == "to err\n"
        if prefixed:
            assert f"[{rank}]<stdout>:to out\n" in ended.out
            assert f"[{rank}]<stderr>:to err\n" in ended.err
    assert ended.out.count("to out\n") == 2
    assert ended.out.count("no newline") == 2


@pytest.mark.any_mpi
def test_output_files_are_padded(tmp_path: Path) -> None:
    ended = pyhvdrun("-n", 11, "--output-filename", tmp_path, "-c", "print('hello')")
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank.{rank:02d}" for rank in range(11)]


@pytest.mark.any_mpi
@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
def test_output_files_that_cannot_be_made(tmp_path: Path, launched: bool) -> None:
    arguments = ("--output-filename", script(tmp_path, ""), "-c", "print('ran')")
    ended = pyhvdrun("-n", 2, *arguments) if launched else bare(2, *arguments)
    assert (ended.code, ended.out) == (1, "")
    said = ended.last if launched else ended.err  # Open MPI's own mpiexec prints a banner after it
    assert "cannot write the files of --output-filename: [Errno 20] Not a directory" in said
    assert ended.err.count("Errno 20") == 1
    assert "Traceback" not in ended.err


def test_a_failed_job_leaves_nothing_behind(tmp_path: Path) -> None:
    ended = bare(2, "/nowhere/script.py", env={"PRTE_MCA_prte_tmpdir_base": str(tmp_path)})
    assert ended.code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.any_mpi
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    ended = pyhvdrun("-n", 2, "--output-filename", tmp_path, "-c", "print('one'); print('two')")
    assert (ended.code, ended.out.count("one"), ended.out.count("two")) == (0, 2, 2)
    path = tmp_path / "rank.0" / "stdout"
    assert ended.err.count(f"pyhvd: {path} gets no more output: No space left on device\n") == 1
    assert (tmp_path / "rank.1" / "stdout").read_text() == "one\ntwo\n"


@pytest.mark.any_mpi
def test_timestamps() -> None:
    ended = pyhvdrun("-n", 1, "--prefix-timestamp", "-c", "print('x')")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[0\]<stdout>:x\n", ended.out)


def test_failure_is_last_with_prefixes_too() -> None:
    ended = pyhvdrun("-n", 2, "--prefix-output", "-c", "raise ValueError('boo')")
    assert (ended.code, ended.last) == (1, "ValueError: boo")


def test_verbose_shows_the_command() -> None:
    ended = pyhvdrun("-n", 1, "--verbose", "-c", "pass")
    assert f"pyhvd: mpi4py is built on {LIBRARY.name}" in ended.err
    assert f"{MPIEXEC} -n 1 {sys.executable} -P -m pyhvd.run -c pass" in ended.err


@pytest.mark.any_mpi
@pytest.mark.parametrize("flag", ["--verbose", "--dry-run"])
def test_values_of_the_users_variables_are_not_shown(flag: str) -> None:
    ended = pyhvdrun(
        "-n", 1, flag, "-x", "TOKEN=s3cret", "-c", "import os; assert os.environ['TOKEN'][0] == 's'"
    )
    assert ended.code == 0, ended.err
    assert "s3cret" not in ended.err
    assert "TOKEN=(not shown)" in ended.err


@pytest.mark.parametrize("launcher", ["mpiexec", "pmi"])
@pytest.mark.parametrize("flags", [(), ("--prefix-output",)], ids=["plain", "prefixed"])
def test_lines_of_two_ranks_are_not_mixed(launcher: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Each rank writes many lines at once, of up to 4,000 bytes."""
    if launcher == "pmi" and LIBRARY.family == OPENMPI:
        pytest.skip("Open MPI's ranks speak no PMI-1")
    path = script(
        tmp_path,
        """
        import os, sys
        rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
        lines = [f"{rank}:{number}:" + "x" * (60 + number * 97 % 3900) for number in range(6000)]
        for at in range(0, 6000, 500):
            sys.stdout.write("\\n".join(lines[at:at + 500]) + "\\n")
        """,
    )
    ended = pyhvdrun("-n", 2, "--launcher", launcher, *flags, path)
    assert ended.code == 0, ended.err
    expected = {(str(rank), number, 60 + number * 97 % 3900) for rank in range(2) for number in range(6000)}
    found = [re.fullmatch(r"(?:\[(\d)\]<stdout>:)?(\d):(\d+):(x+)", line) for line in ended.out.splitlines()]
    assert {(each[2], int(each[3]), len(each[4])) for each in found if each} == expected
    assert all(each and each[1] in (None, each[2]) for each in found)


@pytest.mark.parametrize("launcher", ["mpiexec", "pmi"])
def test_what_a_rank_leaves_behind_does_not_keep_the_job(launcher: str, tmp_path: Path) -> None:
    """Such as TensorBoard, which has the rank's stdout."""
    if launcher == "pmi" and LIBRARY.family == OPENMPI:
        pytest.skip("Open MPI's ranks speak no PMI-1")
    code = "import subprocess; subprocess.Popen(['sleep', '40']); print('done')"
    ended = pyhvdrun("-n", 2, "--launcher", launcher, script(tmp_path, code))
    assert (ended.code, sorted(line[-4:] for line in ended.out.splitlines())) == (0, ["done"] * 2), ended.err
    assert ended.seconds < 20


@pytest.mark.any_mpi
def test_interpreter_flags_reach_the_ranks() -> None:
    command = [sys.executable, "-W", "ignore", "-O", "-m", "pyhvd.run", "-n", "1"]
    ended = run([*command, "-c", "import sys; print(sys.flags.optimize, sys.warnoptions)"])
    assert ended.out == "1 ['ignore']\n"


@pytest.mark.any_mpi
def test_no_mpiexec_at_all(tmp_path: Path) -> None:
    """The Python's folder has no mpiexec, and PATH is empty."""
    code = (
        "import sys, sysconfig\n"
        "sys.executable = '/nowhere/python'; sysconfig.get_path = lambda name: '/nowhere'\n"
        "from pyhvd.job.mpi.flavour import *; find_mpiexec(Flavour('MPICH', '5', 'MPICH'))"
    )
    ended = run([sys.executable, "-c", code], env={"PATH": str(tmp_path)})
    assert 'pip install "pyhvd[mpich]"' in ended.last
    assert 'pip install "pyhvd[openmpi]"' in ended.last
    assert ended.last.startswith("pyhvd.job.errors.LaunchError: no mpiexec beside")


def test_mpiexec_that_fails_is_shown() -> None:
    ended = pyhvdrun("-n", 1, "--mpi-args=--no-such-option", "-c", "pass")
    assert ended.code != 0
    assert ended.last.startswith("pyhvd: mpiexec failed before any rank started (exit code ")
    assert "no-such-option" in ended.last


def test_start_timeout(tmp_path: Path) -> None:
    """The start timeout names a rank whose interpreter hangs while it starts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
        "if rank == '1': time.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    begun = time.monotonic()
    ended = pyhvdrun(
        "-n", 2, "--start-timeout", "2", "-c", "import time; time.sleep(60)", env={"PYTHONPATH": path}
    )
    assert ended.code == 1
    # Rank 0 may be late.
    assert re.match(r"pyhvd: only [01] of 2 ranks started in 2 s \(missing: (0, )?1\)", ended.last)
    assert time.monotonic() - begun < 8


def test_a_launcher_that_stands_still_at_the_start_blames_no_rank(tmp_path: Path) -> None:
    """It is stopped from the start of the ranks' interpreters until after the start timeout."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
        "if rank: open(__file__ + '.' + rank, 'w').close(); time.sleep(0.5)\n"
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    command = launcher_command("-n", 2, "--start-timeout", 2, "-c", "print('done')")
    with started(command, {"PYTHONPATH": path}) as job:
        wait_until(lambda: len(list(tmp_path.glob("sitecustomize.py.*"))) == 2)
        os.kill(job.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(job.pid, signal.SIGCONT)
        out, err = job.communicate(timeout=30)
    assert (job.returncode, out.count("done")) == (0, 2), err


def test_foreign_mpiexec_is_named(tmp_path: Path) -> None:
    other = os.environ.get("PYHVD_OTHER_MPIEXEC")
    if other is None:
        pytest.skip("PYHVD_OTHER_MPIEXEC does not name the mpiexec of another MPI")
    path = script(tmp_path, "import sys, time\nfrom mpi4py import MPI\nprint('never here')\n")
    command = [other, "-n", "2", *launcher_command(path)]
    ended = run(command, bare_environment())
    assert ended.code == 1
    [line] = [line for line in ended.err.splitlines() if "would each be alone" in line]
    starter = "MPICH" if LIBRARY.family == "Open MPI" else "Open MPI"
    assert f"started by {starter}'s mpiexec, but mpi4py is built on {LIBRARY.name}" in line
    assert f"use {MPIEXEC}, or: pyhvdrun -n 2" in line
    # Not the last line: the other rank's MPI library may still write about the same under a foreign mpiexec.
    assert "never here" not in ended.out


def test_foreign_mpiexec_is_no_matter_without_mpi() -> None:
    other = os.environ.get("PYHVD_OTHER_MPIEXEC")
    if other is None:
        pytest.skip("PYHVD_OTHER_MPIEXEC does not name the mpiexec of another MPI")
    ended = run([other, "-n", "2", *launcher_command("-c", "print('fine')")], bare_environment())
    assert (ended.code, ended.out) == (0, "fine\nfine\n"), ended.err


def test_unknown_launcher_falls_back_to_mpi_abort(tmp_path: Path) -> None:
    """Under srun, for example, the supervisor cannot end the job, so it calls MPI_Abort."""
    path = script(
        tmp_path,
        "from mpi4py import MPI\nworld = MPI.COMM_WORLD\nworld.Barrier()\n"
        "if world.rank == 1: raise ValueError('boo')\nworld.Barrier()\n",
    )
    hide = ["env", "-u", "MPI_LOCALNRANKS", "-u", "OMPI_COMM_WORLD_RANK"]
    ended = run([MPIEXEC, "-n", "2", *hide, *launcher_command(path)], bare_environment())
    assert ended.code == 1
    assert ended.err.count("ValueError: boo") == 1
    assert ended.seconds < 5
    if LIBRARY.family == "MPICH":
        assert ended.last == "ValueError: boo"


@pytest.mark.any_mpi
def test_start_costs_little(tmp_path: Path) -> None:
    """The supervisor imports neither MPI nor numpy."""
    code = (
        "import sys; import pyhvd.run.entry.rank_entry\n"
        "print([name for name in ('numpy', 'mpi4py.MPI', 'msgspec', 'cloudpickle') if name in sys.modules])"
    )
    job = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert job.stdout == "[]\n"


@pytest.mark.parametrize(
    ("text", "family", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH ABI: 18", "MPICH", "MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI", "Open MPI", "Open MPI 5.0.11"),
        ("Intel(R) MPI Library 2021.14 for Linux* OS", "MPICH", "Intel MPI 2021.14"),
        ("", "unknown", "an unknown MPI"),
    ],
)
def test_judge_library(text: str, family: str, name: str) -> None:
    flavour = judge_library(text)
    assert (flavour.family, flavour.name) == (family, name)


@pytest.mark.parametrize(
    ("text", "family", "name"),
    [
        ("HYDRA build details:\n    Version:     5.0.2\n", "MPICH", "MPICH 5.0.2"),
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs", "Open MPI", "Open MPI 5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n", "Open MPI", "Open MPI 4.1.4"),
        ("mpiexec (OpenRTE) 4.1.4\n", "Open MPI", "Open MPI 4.1.4"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build", "MPICH", "Intel MPI 2021.14"),
        ("slurm 23", "unknown", "slurm 23"),
    ],
)
def test_judge_mpiexec(text: str, family: str, name: str) -> None:
    flavour = judge_mpiexec(text)
    assert (flavour.family, flavour.name) == (family, name)


def test_root_cause_is_the_first_of_the_most_telling() -> None:
    reports = [
        ExitReport(0, SECONDARY, 1, "", when=1.0),
        ExitReport(1, LOST, 1, "", when=0.5),
        ExitReport(2, EXCEPTION, 1, "", when=3.0),
        ExitReport(3, SIGNAL, 137, "", when=2.0),
        ExitReport(4, INTERRUPT, 130, "", when=1.5),
    ]
    cause = root_cause(reports)
    assert cause is reports[3]
    assert root_cause([]) is None


def test_secondary_errors_are_known_by_name() -> None:
    from pyhvd.errors import MismatchError, RankFailedError, ShutDownError

    assert is_secondary(RankFailedError("x"))
    assert is_secondary(ShutDownError("x"))
    assert not is_secondary(MismatchError("x"))
    assert not is_secondary(ValueError("x"))
    wrapped = ValueError("x")
    wrapped.__context__ = RankFailedError("y")
    assert is_secondary(wrapped)
    wrapped.__suppress_context__ = True
    assert not is_secondary(wrapped)
