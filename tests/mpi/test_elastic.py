"""An elastic program of one rank, as processes that are killed at every place of a commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pyhvd.job.commits.vault import DESCRIPTORS, Vault
from pyhvd.job.mpi.rank_env import RankGeneration

pytestmark = pytest.mark.any_mpi

PROGRAM = """
    import dataclasses, os, signal, sys
    import numpy as np
    import pyhvd as hvd
    from pyhvd.job.commits import vault

    @dataclasses.dataclass
    class Progress:
        step: int = 0

    @hvd.elastic.run
    def train(state):
        while state.progress.step < 6:
            state.weights += state.progress.step
            state.progress.step += 1
            arm(state.progress.step)
            state.commit()
        return state.weights[0]

    def arm(step):
        place, at = sys.argv[1], int(sys.argv[2])
        if step != at:
            return
        if place == "before":
            kill()
        elif place == "copy":
            own = vault.pack
            vault.pack = lambda arrays, rest, memory: (own(arrays[:1], rest, memory), kill())
        elif place == "seal":
            vault.pack = lambda *given, own=vault.pack: (own(*given), kill())
        elif place == "after":
            hvd.elastic.State.commit = lambda self, own=hvd.elastic.State.commit: (own(self), kill())

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    hvd.init()
    progress = Progress()
    state = hvd.elastic.ObjectState(progress=progress, weights=np.zeros(1000))
    state.register_reset_callbacks([lambda: print("reset at", state.progress.step, flush=True)])
    result = train(state)
    assert isinstance(state.progress, Progress)
    print("result", result)
"""


def start(program: Path, vault: Vault, generation: int, place: str, at: int) -> Any:
    seal = vault.newest()
    environ = dict(zip(DESCRIPTORS, map(str, vault.descriptors), strict=True))
    environ |= RankGeneration(generation, seal.number if seal else 0).variables()
    return subprocess.run(
        [sys.executable, str(program), place, str(at)],
        env=os.environ | environ,
        pass_fds=vault.descriptors,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_program_that_is_killed_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    program, vault = tmp_path / "program.py", Vault.create()
    program.write_text(textwrap.dedent(PROGRAM))
    kills = [("before", 1, 0), ("copy", 2, 1), ("seal", 3, 2), ("after", 4, 4)]
    began = 0
    for generation, (place, at, expected) in enumerate(kills):
        done = start(program, vault, generation, place, at)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout.split() == (["reset", "at", str(began)] if began else [])
        seal = vault.newest()
        assert (seal.number if seal else 0) == expected
        began = expected
    done = start(program, vault, len(kills), "never", 0)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["reset at 4", "result 15.0"]), done.stderr


def test_a_program_makes_room(tmp_path: Path) -> None:
    program, vault = tmp_path / "program.py", Vault.create()
    program.write_text(textwrap.dedent(PROGRAM))
    vault.wished = 1
    done = start(program, vault, 0, "never", 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seal = vault.newest()
    assert seal is not None
    assert (seal.number, vault.left) == (1, 1)
    done = start(program, vault, 1, "never", 0)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["reset at 1", "result 15.0"]), done.stderr
