"""What jobs have left is removed at the next start: only old files of this user that no process has."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyhvd.job.process.segments import sweep

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")

_HOLD = "import mmap, sys; held = {how}; print(flush=True); sys.stdin.read()"
_OPENS = "open(sys.argv[1])"
_MAPS = "(f := open(sys.argv[1], 'r+b'), mmap.mmap(f.fileno(), 4096), f.close())"


def _make(path: Path, age: float = 1e4) -> Path:
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, (time.time() - age,) * 2)
    return path


def _sweep(folder: Path) -> set[str]:
    """Sweep a folder; return the names of what is there then."""
    sweep(f"{folder}/", f"{folder}/hydra_hwloc_xmlfile_*")
    return {path.name for path in folder.iterdir()}


def test_old_files_of_ended_jobs_are_removed(tmp_path: Path) -> None:
    for name in ("mpich_shm_5f_0", "ucx_shm_posix_5f", "pyhvd-window-abcd", "hydra_hwloc_xmlfile_abcd"):
        _make(tmp_path / name)
    meeting = tmp_path / "pyhvd-links-abcd"
    meeting.mkdir()
    _make(meeting / "links")
    os.utime(meeting, (0, 0))
    assert _sweep(tmp_path) == set()


def test_new_files_stay(tmp_path: Path) -> None:
    """A rank of another container may have them, whose processes are not seen here."""
    for name, age in (
        ("mpich_shm_5f_0", 5.0),
        ("pyhvd-window-abcd", 5.0),
        ("hydra_hwloc_xmlfile_abcd", 300.0),
    ):
        _make(tmp_path / name, age)
    (tmp_path / "pyhvd-links-abcd").mkdir()
    assert len(_sweep(tmp_path)) == 4


def test_other_files_stay(tmp_path: Path) -> None:
    """Those of Open MPI may be opened later; the others are none of pyhvd's and MPI's."""
    names = {"sm_segment.host.0.1.0", "own_file", "psm2_shm", "xpyhvd-window-abcd"}
    for name in names:
        _make(tmp_path / name)
    assert _sweep(tmp_path) == names


def test_the_folders_of_other_parts_stay(tmp_path: Path) -> None:
    """TMPDIR may be /dev/shm: then a job's private folder and the user's folder are there, and get old."""
    for name in ("pyhvd-0", "pyhvd-x8a5_w1z"):
        (tmp_path / name).mkdir()
        _make(tmp_path / name / "elastic-7.socket")
        os.utime(tmp_path / name, (0, 0))
    _make(tmp_path / "pyhvd-first-failure-1-2-3")
    assert _sweep(tmp_path) == {"pyhvd-0", "pyhvd-x8a5_w1z", "pyhvd-first-failure-1-2-3"}
    assert (tmp_path / "pyhvd-0" / "elastic-7.socket").exists()


@pytest.mark.parametrize("how", [_OPENS, _MAPS])
@pytest.mark.parametrize("name", ["mpich_shm_5f_0", "pyhvd-window-abcd"])
def test_files_of_a_living_process_stay_until_it_ends(tmp_path: Path, how: str, name: str) -> None:
    path = _make(tmp_path / name)
    command = [sys.executable, "-c", _HOLD.format(how=how), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        _make(tmp_path / f"{name}0")
        assert _sweep(tmp_path) == {name}
        holder.kill()
    assert _sweep(tmp_path) == set()


def test_nothing_behind_a_symbolic_link_is_removed(tmp_path: Path) -> None:
    """Anybody may make links in /dev/shm, also to a folder of another user."""
    own = tmp_path / "own"
    own.mkdir()
    _make(own / "notes")
    os.utime(own, (0, 0))
    links = tmp_path / "shm"
    links.mkdir()
    (links / "pyhvd-links-x").symlink_to(own)
    os.utime(links / "pyhvd-links-x", (0, 0), follow_symlinks=False)
    assert _sweep(links) == {"pyhvd-links-x"}
    assert (own / "notes").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_files_of_other_users_stay(tmp_path: Path) -> None:
    os.chown(_make(tmp_path / "mpich_shm_5f_0"), 12345, -1)
    assert _sweep(tmp_path) == {"mpich_shm_5f_0"}
