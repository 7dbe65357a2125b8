"""Run the shared-memory C code under the sanitizers: data races, memory errors, undefined behaviour.

``races/`` runs ranks as threads of one process, with the C calls that the Cython code makes. It is compiled
with all C sources of the extensions, once for ThreadSanitizer and once for AddressSanitizer and UBSan.
PYHVD_STRESS_RACES multiplies the number of rounds (default 1).

Limits of ThreadSanitizer
1. It does not see ``atomic_thread_fence``. Only flags (sleeping, watching) may depend on a fence. Data must
   be announced by a release store and read after an acquire load; data that depends on a fence is reported
   as a race.
2. The kernels run without their clones for several instruction sets, and the masked loads and stores of the
   16-bit floats are not seen.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RACES = Path(__file__).resolve().parent / "races"
SRC = ROOT / "pyhvd" / "native" / "src"
TIMES = int(os.environ.get("PYHVD_STRESS_RACES", "1"))
LIMIT_S = 60.0 * (1 + TIMES)

MANY = max(4, min(8, (os.cpu_count() or 1) + 1))
"""More ranks than cores, up to 8."""

ROUNDS = {
    "windows": 600,
    "aborts": 40,
    "table": 400,
    "calls": 2000,
    "paths": 400,
    "path-aborts": 15,
    "hosts": 200,
    "agreements": 600,
    "ids": 1500,
    "turns": 600,
}
SCENARIOS = [(scenario, ranks, ROUNDS[scenario]) for ranks in (2, 3, MANY) for scenario in ROUNDS]

KINDS = {
    # -Wno-tsan: gcc warns about every fence; see above.
    "thread": ["-fsanitize=thread", "-Wno-tsan"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}

BROKEN = [
    ("window.c", "value, value, memory_order_release", "value, value, memory_order_relaxed", "windows"),
    (
        "ready_table.c",
        "&t->shared->lock, 0, memory_order_release",
        "&t->shared->lock, 0, memory_order_relaxed",
        "table",
    ),
    ("ready_table.c", "tail + 1, memory_order_release", "tail + 1, memory_order_relaxed", "table"),
    ("progress.c", "finished, 1, memory_order_release", "finished, 1, memory_order_relaxed", "paths"),
    ("progress.c", "lock, 0, memory_order_release", "lock, 0, memory_order_relaxed", "paths"),
    ("call_ids.c", "state, 1, memory_order_release", "state, 1, memory_order_relaxed", "ids"),
    ("agreement.c", "written, at, memory_order_release", "written, at, memory_order_relaxed", "agreements"),
    ("agreement.c", "receiving, 0, memory_order_release", "receiving, 0, memory_order_relaxed", "agreements"),
]
"""Wrong memory orders that must be reported: the file, the right text, the wrong text, the scenario."""


def _sources() -> list[str]:
    """Return the C sources of the extensions, relative to the root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in SRC.rglob("*.c"))


def _gcc(kind: str, folder: Path, *arguments: str | Path) -> str:
    """Run gcc in a folder; return its errors, or an empty text."""
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-O2", "-ffp-contract=off", *KINDS[kind]]
    command = ["gcc", *flags, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    return f"{command}: {done.stderr}" if done.returncode else ""


def _compile(kind: str, folder: Path, sources: list[Path]) -> None:
    """Compile sources into the folder."""
    assert not _gcc(kind, folder, f"-I{SRC}", f"-I{RACES}", "-c", *sources)


def _link(kind: str, folder: Path, objects: list[Path]) -> Path:
    hooks = "-Wl,--wrap=pyhvd_ready_table_advance"  # paths.c notes the order of the log's entries
    assert not _gcc(kind, folder, *objects, hooks, "-o", "races", "-pthread", "-lm")
    return folder / "races"


def _run(program: Path, scenario: str, ranks: int, rounds: int) -> subprocess.CompletedProcess[str]:
    options = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(program), scenario, str(ranks), str(rounds * TIMES), "1"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **options}
    )


def _need(kind: str, folder: Path) -> None:
    """Skip the test if this machine cannot build or run programs with a sanitizer."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    (folder / "trial.c").write_text("int main(void) { return 0; }\n")
    complaint = _gcc(kind, folder, "trial.c", "-o", "trial")
    if complaint:
        pytest.skip(f"gcc cannot build for the {kind} sanitizer: {complaint[-300:]}")
    ran = subprocess.run([folder / "trial"], capture_output=True, text=True, timeout=LIMIT_S)
    if ran.returncode:
        pytest.skip(f"the {kind} sanitizer does not run here: {ran.stderr[-300:]}")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """Return the object files for a kind of sanitizer; one of pytest's workers compiles them for all."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def build(kind: str) -> list[Path]:
        folder = shared / f"races-{kind}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                _need(kind, folder)
                _compile(kind, folder, [*(ROOT / name for name in _sources()), *RACES.glob("*.c")])
                (folder / "complete").touch()
        return sorted(folder.glob("*.o"))

    return build


@pytest.fixture(scope="module", params=list(KINDS))
def program(
    request: pytest.FixtureRequest,
    objects: Callable[[str], list[Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    kind = str(request.param)
    return _link(kind, tmp_path_factory.mktemp("races"), objects(kind))


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(("scenario", "ranks", "rounds"), SCENARIOS)
def test_nothing_is_reported(program: Path, scenario: str, ranks: int, rounds: int) -> None:
    ran = _run(program, scenario, ranks, rounds)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(("name", "right", "wrong", "scenario"), BROKEN)
def test_a_wrong_ordering_is_reported(
    objects: Callable[[str], list[Path]], tmp_path: Path, name: str, right: str, wrong: str, scenario: str
) -> None:
    whole = objects("thread")
    (source,) = SRC.rglob(name)
    text = source.read_text()
    assert right in text, f"{name} no longer says {right!r}: break it otherwise here"
    (tmp_path / name).write_text(text.replace(right, wrong))
    _compile("thread", tmp_path, [tmp_path / name])
    broken = Path(name).with_suffix(".o").name
    kept = [path for path in whole if path.name != broken]
    ran = _run(_link("thread", tmp_path, [*kept, tmp_path / broken]), scenario, 3, 400)
    assert ran.returncode == 66, ran.stdout + ran.stderr
    assert "data race" in ran.stderr
