"""Trace files: their paths, that they are readable at any moment, and the errors for broken files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pyhvd.observe.trace.files import TraceError, TraceWriter, rank_path, read_events


def _event(k: int) -> dict[str, object]:
    return {"name": f"tensor/{k} \u00fc", "ph": "B", "ts": k / 1000, "pid": 1, "tid": 0}


def test_where_a_rank_writes(tmp_path: Path) -> None:
    assert rank_path("/a/trace.json", 0) == Path("/a/trace.json")
    assert rank_path("/a/trace.json", 3) == Path("/a/trace.rank3.json")
    assert rank_path("/a/trace", 1) == Path("/a/trace.rank1")
    assert rank_path("/nowhere/", 0) == Path("/nowhere/timeline.json")
    assert rank_path(str(tmp_path), 2) == tmp_path / "timeline.rank2.json"
    assert rank_path("/a/trace.json", 0, 2) == Path("/a/trace.generation2.json")
    assert rank_path("/a/trace.json", 3, 12) == Path("/a/trace.generation12.rank3.json")


def test_it_is_json_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    writer = TraceWriter(path)
    assert json.loads(path.read_text()) == []
    expected: list[dict[str, object]] = []
    for k in range(5):
        more = [_event(j) for j in range(k)]
        writer.write(more)
        expected += more
        assert json.loads(path.read_text()) == expected
        assert read_events(path) == (expected, False)
    writer.close()
    writer.close()
    assert json.loads(path.read_text()) == expected


def test_an_older_file_is_overwritten_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("x" * 10_000)
    TraceWriter(path).close()
    assert json.loads(path.read_text()) == []


@given(data=st.data())
def test_a_file_cut_anywhere_gives_all_but_its_last_line(
    data: st.DataObject, tmp_path_factory: object
) -> None:
    assert isinstance(tmp_path_factory, pytest.TempPathFactory)
    path = tmp_path_factory.mktemp("cut") / "t.json"
    events = [_event(k) for k in range(6)]
    writer = TraceWriter(path)
    writer.write(events)
    writer.close()
    whole = path.read_bytes()
    at = data.draw(st.integers(2, len(whole)))
    path.write_bytes(whole[:at])
    read, _ = read_events(path)
    lines = whole[:at].count(b"},\n") + whole[:at].count(b"}\n]")
    assert len(read) in (lines, min(lines + 1, 6))
    assert read == events[: len(read)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "first line is not '\\['"),
        ("hello\n", "first line is not '\\['"),
        ('{"traceEvents": []}', "not a JSON array"),
        ("[1, 2]", "not a JSON array"),
        ('[\n{"a": 1},\nnonsense,\n{"b": 2}\n]\n', "line 3: damaged"),
    ],
)
def test_broken_files_are_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=says) as caught:
        read_events(path)
    assert str(path) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_events(tmp_path / "none.json")


def test_what_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TraceWriter(tmp_path / "none" / "t.json")
    with pytest.raises(IsADirectoryError):
        TraceWriter(tmp_path)
    reader, written = os.pipe()
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            TraceWriter(Path(f"/proc/self/fd/{written}"))
    finally:
        os.close(reader)
        os.close(written)


def test_a_directory_is_made_where_that_is_wanted(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "a" / "b" / "t.json", make_directory=True)
    writer.close()
    assert (tmp_path / "a" / "b" / "t.json").exists()
