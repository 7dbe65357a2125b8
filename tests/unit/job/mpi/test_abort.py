"""Which rank of a host is the first to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyhvd.job.mpi.abort import claim_first_failure


def claims_in_a_process_that_ends(parent: int) -> bool:
    code = f"import sys; from pyhvd.job.mpi.abort import *; sys.exit(not claim_first_failure({parent}))"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_claim_in_the_session_directory_outlasts_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host-7@1")
    assert claims_in_a_process_that_ends(os.getpid())
    assert not claims_in_a_process_that_ends(os.getpid())
    assert not claim_first_failure(os.getpid())


def test_a_claim_is_that_of_one_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "prte-host-7@1")
    assert claim_first_failure(os.getpid())
    assert claim_first_failure(os.getppid())  # another mpiexec
    monkeypatch.setenv("PMIX_NAMESPACE", "prte-host-7@2")  # another job of the same server
    assert claim_first_failure(os.getpid())
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the abstract socket namespace")
@pytest.mark.parametrize(("directory", "process"), [("", os.getpid), ("/nowhere", os.getppid)])
def test_without_a_session_directory_a_claim_lasts_as_long_as_its_process(
    directory: str, process: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = process()
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", directory)
    assert claims_in_a_process_that_ends(parent)
    assert claim_first_failure(parent)
    assert not claims_in_a_process_that_ends(parent)
