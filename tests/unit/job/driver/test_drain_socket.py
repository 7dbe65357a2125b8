"""The socket by which a user asks an elastic job to drain a host."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pyhvd.job.driver import drain_socket
from pyhvd.job.driver.drain_socket import DrainError, DrainSocket, ask_to_drain, find_jobs
from pyhvd.tools import elastic

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elastic jobs need Linux")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path / "pyhvd"


def drain(host: str) -> str:
    if host != "h1":
        raise DrainError(f"no host {host}")
    return "it goes"


@pytest.fixture
def served() -> Iterator[Path]:
    """Yield the path of a socket that a thread serves."""
    over = threading.Event()
    with closing(DrainSocket()) as made:

        def serve() -> None:
            while not over.wait(0.01):
                made.serve(drain)

        thread = threading.Thread(target=serve)
        thread.start()
        yield made._path
        over.set()
        thread.join()


def test_an_answer_and_an_error(served: Path) -> None:
    assert find_jobs() == {os.getpid(): served}
    assert ask_to_drain(served, "h1") == "it goes"
    with pytest.raises(DrainError, match="no host h2"):
        ask_to_drain(served, "h2")
    assert elastic.main(["drain", "h1"]) == 0
    assert elastic.main(["drain", "h2"]) == 1


def test_a_peer_that_says_nothing_holds_up_no_other(served: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(os.fspath(served))
        assert ask_to_drain(served, "h1") == "it goes"


def test_after_the_end_there_is_no_job(folder: Path) -> None:
    with closing(DrainSocket()):
        pass
    assert list(folder.iterdir()) == []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:  # of a launcher that was killed
        left.bind(os.fspath(folder / "elastic-4711.socket"))
    assert find_jobs() == {}
    with pytest.raises(DrainError, match="does not answer"):
        ask_to_drain(folder / "elastic-4711.socket", "h1")


def test_a_launcher_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_socket, "_ANSWER_S", 0.05)
    with closing(DrainSocket()) as made, pytest.raises(DrainError, match="does not answer: timed out"):
        ask_to_drain(made._path, "h1")


def test_a_folder_that_others_can_enter_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with closing(DrainSocket()) as made:
        assert not made._path.is_relative_to(folder)
        assert list(find_jobs().values()) == [made._path]
    assert list(folder.iterdir()) == []
    assert elastic.main(["drain", "h1"]) == 1


def test_one_of_several_jobs(
    served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elastic, "find_jobs", lambda: {1: served, 2: served})
    assert elastic.main(["drain", "h1"]) == 1
    assert "with --job: 1, 2\n" in capsys.readouterr().err
    assert elastic.main(["drain", "h1", "--job", "2"]) == 0


def test_the_socket_of_a_killed_launcher_is_removed_but_no_young_one(folder: Path, served: Path) -> None:
    old, young = folder / "elastic-1.socket", folder / "elastic-2.socket"
    for path in (old, young):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(os.fspath(path))
    for path in (old, served):
        os.utime(path, (0, 0))
    served.rename(folder / "elastic-3.socket")  # of another launcher, which runs
    with closing(DrainSocket()):
        assert not old.exists()
        assert young.exists()
        assert (folder / "elastic-3.socket").exists()
