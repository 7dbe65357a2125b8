"""Trace files: their paths, the writer, and the reader.

A file is a JSON array of Chrome trace events, one per line. Each write replaces the closing bracket by new
events and a new bracket, in one call. The file is therefore valid JSON if the rank dies between two writes.
If a write was cut (a full disk, a crashed machine), all lines but the last are readable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1
HEADER, CLOCK, END = "pyhvd_header", "pyhvd_clock", "pyhvd_end"
"""Names of pyhvd's own metadata events; viewers skip them."""

DEFAULT_NAME = "timeline.json"

_OPENING, _CLOSING = b"[", b"\n]\n"
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()

Event = dict[str, Any]


class TraceError(ValueError):
    """A trace file is not readable, or files are not of one recording; the text names the files."""


def metadata(name: str, args: Event, pid: int = 0, tid: int = 0) -> Event:
    """Return a metadata event."""
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def rank_path(path: str, rank: int, generation: int = 0) -> Path:
    """Return the path of a rank's trace file.

    Rank 0 writes to the path itself, as in Horovod; rank r to ``<stem>.rank<r><suffix>`` beside it. For a
    directory (an existing one, or a path that ends in a slash) the file is ``timeline.json`` in it. A later
    generation of an elastic job puts ``.generation<number>`` after the stem, and so keeps the older files.
    """
    base = Path(path)
    if path.endswith(os.sep) or base.is_dir():
        base = base / DEFAULT_NAME
    later = f".generation{generation}" if generation else ""
    return base.with_name(f"{base.stem}{later}{f'.rank{rank}' if rank else ''}{base.suffix}")


class TraceWriter:
    """The writer of one trace file.

    Parameters
    ----------
    path : Path
        Overwritten if it exists; its directory must exist, unless ``make_directory``.
    make_directory : bool
        Whether to create the directory; several ranks may do so at once.

    Raises
    ------
    OSError
        The file is not writable.
    """

    def __init__(self, path: Path, *, make_directory: bool = False) -> None:
        self.path = path
        if make_directory:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._end = 0
        try:
            self._write(_OPENING + _CLOSING)
        except OSError:
            os.close(self._file)
            raise

    def write(self, events: Iterable[Event]) -> None:
        """Append events; return when the kernel has them. Raises OSError."""
        lines = b",\n".join(_encoder.encode(event) for event in events)
        if lines:
            first = self._end == len(_OPENING)
            self._write((b"\n" if first else b",\n") + lines + _CLOSING)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        """Write over the closing bracket and beyond."""
        at, left = self._end, memoryview(data)
        while left:
            written = os.pwrite(self._file, left, at)
            at += written
            left = left[written:]
        self._end = at - len(_CLOSING)


def read_bytes(path: Path, most: int = -1) -> bytes:
    """Return a file's content, or its first bytes; raise TraceError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as exc:
        raise TraceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def read_events(path: Path) -> tuple[list[Event], bool]:
    """Return a file's events, and whether its last line was cut.

    Raises
    ------
    TraceError
        The file is not readable, or not a Chrome trace with one event per line.
    """
    data = read_bytes(path)
    try:
        events = _decoder.decode(data)
        cut = False
    except msgspec.DecodeError:
        events, cut = _read_lines(path, data), True
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path}: not a JSON array of trace events")
    return events, cut


def _read_lines(path: Path, data: bytes) -> list[Any]:
    lines = data.split(b"\n")
    if lines[0].strip() != b"[":
        raise TraceError(f"{path}: not a trace of pyhvd: the first line is not '['")
    lines = [line for line in (each.strip().rstrip(b",") for each in lines[1:]) if line not in (b"", b"]")]
    events = []
    for number, line in enumerate(lines):
        try:
            events.append(_decoder.decode(line))
        except msgspec.DecodeError as exc:
            if number < len(lines) - 1:
                raise TraceError(f"{path}, line {number + 2}: damaged: {exc}") from None
    return events
