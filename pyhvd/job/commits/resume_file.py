"""The resume file of an elastic job: what a later run of the job needs to go on from the elastic store.

Invariants
----------
1. The file is its owner's alone: its key signs the commits that ranks unpickle.
2. The number of each generation is written before its ranks start. So a later run numbers its generations
   higher, also after the launcher was killed, and its commits are newer than all before.
3. The file is replaced as a whole.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec


class ResumeError(Exception):
    """The file cannot be read or written, or is no resume file; the text says which and why."""


class _Content(msgspec.Struct):
    """`job` and `key` are those of the store's order; `generation` is the last that was started, or -1."""

    job: str
    key: bytes
    generation: int = -1


class ResumeFile:
    """A resume file; without one, a new job begins. :meth:`note` writes it.

    Parameters
    ----------
    path : str
        The file.

    Raises
    ------
    ResumeError
        See the class.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._content = self._read() or _Content(secrets.token_hex(6), secrets.token_bytes(32))
        self.first = self._content.generation + 1
        """The number of this run's first generation."""

    @property
    def job(self) -> str:
        """The job's name in the store."""
        return self._content.job

    @property
    def key(self) -> bytes:
        """The job's secret."""
        return self._content.key

    def note(self, generation: int) -> None:
        """Write that a generation starts.

        Raises
        ------
        ResumeError
            The file cannot be written.
        """
        self._content.generation = generation
        new = f"{self.path}.new"
        try:
            Path(new).unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(self._content))
            Path(new).replace(self.path)
        except OSError as exc:
            raise ResumeError(f"cannot write the resume file {self.path}: {exc.strerror}") from exc

    def remove(self) -> None:
        """Remove the file, as the job has finished."""
        Path(self.path).unlink(missing_ok=True)

    def _read(self) -> _Content | None:
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    raise ResumeError(
                        f"the resume file {self.path} is not yours alone: chmod 600, or name another"
                    )
                return msgspec.json.decode(file.read(), type=_Content)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ResumeError(f"cannot read the resume file {self.path}: {exc.strerror}") from exc
        except msgspec.MsgspecError as exc:
            raise ResumeError(f"{self.path} is no resume file: {exc}") from exc
