"""A process's part in an elastic job, by its variables and descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from pyhvd.elastic.session import RankSession
from pyhvd.job.commits.vault import DESCRIPTORS, Vault
from pyhvd.job.mpi.rank_env import RankGeneration

SHOWN = "from pyhvd.elastic import enabled, generation, max_size; print(enabled(), generation(), max_size())"


def variables(vault: Vault, **others: Any) -> dict[str, str]:
    numbers = dict(zip(DESCRIPTORS, map(str, vault.descriptors), strict=True))
    return numbers | RankGeneration(3, **others).variables()


def show(environ: dict[str, str], descriptors: tuple[int, ...] = ()) -> str:
    command = [sys.executable, "-c", SHOWN]
    return subprocess.run(
        command, env=os.environ | environ, pass_fds=descriptors, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_rank_knows_its_generation() -> None:
    vault = Vault.create()
    assert show(variables(vault, max_size=8), vault.descriptors) == "True 3 8"
    assert show(variables(vault), vault.descriptors) == "True 3 None"
    assert show({}) == "False 0 None"


def test_a_child_without_the_vault_is_no_rank() -> None:
    assert show(variables(Vault.create(), max_size=8)) == "False 0 None"


def test_a_session_holds_the_commit_of_its_generation_only() -> None:
    vault = Vault.create()
    vault.write(4, 2, [], b"")
    assert RankSession(variables(vault, commit=4)).held == vault.newest()
    assert RankSession(variables(vault, commit=5)).held is None
    assert RankSession(variables(Vault.create(), commit=4)).held is None


def test_ranks_leave_for_a_later_generation() -> None:
    vault = Vault.create()
    found = RankSession(variables(vault))
    for wished, expected in ((2, False), (3, False), (4, True)):
        vault.wished = wished
        assert found.shall_leave is expected


def test_a_session_has_one_state() -> None:
    found, state = RankSession(variables(Vault.create())), object()
    assert found.enter(state)
    assert not found.enter(state)
    with pytest.raises(RuntimeError, match=r"^an elastic job has one state, and run\(\) was called with"):
        found.enter(object())
