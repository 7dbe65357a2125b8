"""Recordings of ranks with known clocks: put on one clock, merged with arrows, summarised."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pyhvd.observe.trace.files import TraceError
from pyhvd.observe.trace.loading import load
from pyhvd.observe.trace.merging import TRACKS, TraceSpan, lay_out, merge
from pyhvd.observe.trace.summary import covered, summarise, summarise_hosts
from pyhvd.tools.trace import main
from tests.chrome_trace import check_events
from tests.unit.observe.recordings import MS, Recording, Skew, request

SKEWS = (Skew(), Skew(7_000 * MS, 5e-5), Skew(-3_000 * MS, -8e-5))
SLOW = 2
LATE = 4 * MS


def _record(path: Path, *, turns: int = 20, job: str = "job", begin: int = 0) -> list[Recording]:
    """Record turns of 10 ms on 3 ranks: rank 2 submits 4 ms late, agreement takes 1 ms, queue 2, batch 3."""
    ranks = [
        Recording(str(path), rank, 3, skew, job, begin, begin + 1000 * MS) for rank, skew in enumerate(SKEWS)
    ]
    for k in range(turns):
        start = begin + 10 * k * MS
        for rank, recording in enumerate(ranks):
            submitted = start + (LATE if rank == SLOW else 0)
            times = (submitted, start + LATE + MS, start + LATE + 3 * MS, start + LATE + 6 * MS)
            recording.turn(k, f"w{k % 2}", times)
    return ranks


def test_all_ranks_on_one_clock(tmp_path: Path) -> None:
    for recording in _record(tmp_path / "t.json"):
        recording.close()
    traces = load([str(tmp_path)])
    assert [trace.rank for trace in traces] == [0, 1, 2]
    for trace in traces:
        assert trace.complete
        for k, turn in enumerate(trace.turns):
            start = 10_000.0 * k
            assert turn.submitted == pytest.approx(start + (4000 if trace.rank == SLOW else 0), abs=0.01)
            assert (turn.ready, turn.begun, turn.ended) == pytest.approx(
                (start + 5000, start + 7000, start + 10_000), abs=0.01
            )
    assert traces[1].clock.drift == pytest.approx(50, abs=0.1)


def test_the_merged_trace(tmp_path: Path) -> None:
    for recording in _record(tmp_path / "t.json"):
        recording.close()
    merged = merge(load([str(tmp_path)]))
    events = merged["traceEvents"]
    check_events(events)
    assert {event["pid"] for event in events} == {0, 1, 2}
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {name for _, name in names} <= set(TRACKS)
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) == 20 * 2
    assert {event["pid"] for event in arrows} == {SLOW}
    assert {event["pid"] for event in events if event["ph"] == "f"} == {0, 1}
    assert [event["ts"] for event in arrows[:2]] == pytest.approx([4000.0] * 2, abs=0.01)
    assert merged["metadata"]["pyhvd_uncertainty_us"] == 1.0
    assert merged["metadata"]["pyhvd_ranks"]["2"]["drift_ppm"] == pytest.approx(-80, abs=0.1)


def test_a_turn_that_failed_shows_its_error_and_no_queue(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path / "t.json"), 0, 1, Skew())
    recording.rows.queued(1 * MS, [(0, request("w"))])
    recording.rows.listed(2 * MS, 0, [((0, request("w")), "Mismatched shapes")])
    recording.close()
    spans = [event for event in merge(load([str(tmp_path)]))["traceEvents"] if event["ph"] == "X"]
    assert [(e["cat"], e["dur"], e["args"]["error"]) for e in spans] == [
        ("NEGOTIATE_ALLREDUCE", 1000.0, "Mismatched shapes"),
        ("ALLREDUCE", 0.0, "Mismatched shapes"),
    ]


def test_a_turn_submitted_before_the_recording_has_no_arrow(tmp_path: Path) -> None:
    for rank in (0, 1):
        recording = Recording(str(tmp_path / "t.json"), rank, 2, Skew())
        tensors = [(0, request("w"))]
        recording.rows.listed(1 * MS, 0, [(tensors[0], "")])
        recording.rows.started(2 * MS, tensors)
        recording.rows.ended(3 * MS, tensors)
        recording.close()
    events = merge(load([str(tmp_path)]))["traceEvents"]
    shown = [(e["pid"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] != "M"]
    assert shown == [
        (0, "QUEUE", 0.0, 1000.0),
        (0, "ALLREDUCE", 1000.0, 1000.0),
        (1, "QUEUE", 0.0, 1000.0),
        (1, "ALLREDUCE", 1000.0, 1000.0),
    ]


def test_the_sum_names_the_slowest_rank(tmp_path: Path) -> None:
    for recording in _record(tmp_path / "t.json"):
        recording.close()
    everything, tensors = summarise(load([str(tmp_path)]))
    assert [(total.name, total.turns) for total in tensors] == [("allreduce.w0", 10), ("allreduce.w1", 10)]
    assert everything.turns == 20
    assert everything.last == {SLOW: 20}
    assert everything.slowest_rank() == SLOW
    # Two of three ranks wait 4 ms in each of 20 turns.
    expected = {"slowest": 160 / 3, "negotiation": 20, "queue": 40, "pack": 30, "reduce": 30, "unpack": 0}
    for part, ms in expected.items():
        assert everything.parts[part] / 1000 == pytest.approx(ms, abs=0.01), part
        assert sum(total.parts[part] for total in tensors) / 1000 == pytest.approx(ms, abs=0.01), part


def test_together_counts_time_once() -> None:
    assert covered([]) == 0
    assert covered([(0, 10), (2, 3), (5, 12), (20, 21)]) == 13


def test_spans_nest_or_go_to_another_lane() -> None:
    spans = [
        TraceSpan(0, 10, "a", "", {}),
        TraceSpan(2, 5, "b", "", {}),
        TraceSpan(4, 12, "c", "", {}),
        TraceSpan(10, 11, "d", "", {}),
    ]
    assert [(span.name, span.lane) for span in lay_out(spans)] == [("a", 0), ("b", 0), ("c", 1), ("d", 0)]


def test_what_nests_still_nests_in_a_viewer(tmp_path: Path) -> None:
    """Perfetto multiplies us by 1000 and truncates; it drops a span that is one ns too long."""
    ranks = _record(tmp_path / "t.json", turns=50)
    for recording in ranks:
        recording.close()
    traces = load([str(tmp_path)])
    for trace in traces:
        trace.turns[:] = [  # converted times have fractions
            replace(
                turn,
                ready=turn.ready + 0.0007 * turn.batch,
                begun=turn.begun + 0.0004,
                ended=turn.ended + 0.00049 * turn.batch,
            )
            for turn in trace.turns
        ]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in merge(traces)["traceEvents"]:
        if event["ph"] == "X":
            begin = int(event["ts"] * 1000)
            spans = threads.setdefault((event["pid"], event["tid"]), [])
            spans.append((begin, begin + int(event["dur"] * 1000)))
    assert not any(tid in (0, pid) for pid, tid in threads)  # Perfetto treats these as one thread
    for spans in threads.values():
        open_ends: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_a_killed_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = _record(tmp_path / "t.json", turns=4)
    for recording in ranks:
        recording.rows.queued(recording.skew.shows(60 * MS), [(0, request("w9"))])
        recording.flush()
    cut = ranks[1].path.read_bytes()[:-40]
    ranks[1].path.write_bytes(cut)
    ranks[2].path.unlink()
    output = tmp_path / "merged.json"
    assert main(["merge", str(tmp_path), "-o", str(output)]) == 0
    check_events(json.loads(output.read_text())["traceEvents"])
    told = capsys.readouterr().err
    assert "of 3 ranks, there is no file of rank 2" in told
    assert "t.json: the recording was not ended (killed?)\n" in told
    assert "t.rank1.json: the recording was not ended (killed?), and its last line is cut off" in told
    assert "drift unknown: not measured at the end" in told
    assert "rank 0: allreduce.w9 was still in NEGOTIATE_ALLREDUCE" in told


def test_several_recordings_in_one_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, job, begin in (("one", "1", 0), ("two", "2", 5000 * MS)):
        for recording in _record(tmp_path / f"{name}.json", turns=3, job=job, begin=begin):
            recording.close()
    assert main(["summary", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "files of 2 recordings: name one file of the recording you want" in told
    assert f"{tmp_path / 'one.json'} (ranks 0-2, started at" in told
    assert main(["summary", str(tmp_path / "two.rank1.json")]) == 0
    assert "allreduce.w0" in capsys.readouterr().out


def test_generations_of_an_elastic_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for generation in (0, 2):
        recording = Recording(
            str(tmp_path / "t.json"), 0, 1, Skew(), job=str(generation), generation=generation
        )
        recording.turn(0, "w", (1, 2, 3, 4))
        recording.close()
    assert main(["summary", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"{tmp_path / 't.json'} (rank 0, started at" in told
    assert f"{tmp_path / 't.generation2.json'} (rank 0 of generation 2, started at" in told
    assert main(["summary", str(tmp_path / "t.generation2.json")]) == 0
    assert "mean of rank 0 of generation 2\n" in capsys.readouterr().out
    assert merge(load([str(tmp_path / "t.generation2.json")]))["metadata"]["pyhvd_generation"] == 2


def test_a_file_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for recording in _record(tmp_path / "t.json"):
        recording.close()
    monkeypatch.chdir(tmp_path)
    assert len(load([".", str(tmp_path), "t.json", str(tmp_path / "t.rank1.json")])) == 3
    shutil.copy(tmp_path / "t.rank1.json", tmp_path / "u.json")
    assert main(["summary", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"{tmp_path / 't.rank1.json'} and {tmp_path / 'u.json'} are both of rank 1" in told


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recording in _record(tmp_path / "t.json"):
        recording.close()
    assert main(["summary", str(tmp_path), "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "time by part: ms, summed over turns, mean of ranks 0-2"
    assert lines[1].split()[:4] == ["tensor", "turns", "MiB", "total"]
    assert lines[3].split()[:6] == ["allreduce.w0", "10", "0.01", "86.667", "26.667", "10.000"]
    assert lines[4] == "(1 more)"
    assert lines[6].split()[:3] == ["all", "together", "20"]
    assert lines[6].split()[-2:] == ["rank", "2"]
    assert lines[-1] == (
        "rank 2 was the last to submit in 20 of 20 turns; the ranks waited 53.333 ms for it (mean)"
    )


def test_what_crossed_between_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 exchanges for 1 ms with h1 and 2 ms with h2 in one batch of 4 ms; rank 1 for 1 ms with h2."""
    ranks = [Recording(str(tmp_path / "t.json"), rank, 2, SKEWS[rank]) for rank in range(2)]
    stretches = [[(3, 4, "h1"), (5, 7, "h2")], [(4, 5, "h2")]]
    for rank, recording in enumerate(ranks):
        shows, rows, tensors = recording.skew.shows, recording.rows, [(0, request("w"))]
        rows.queued(shows(0), tensors)
        rows.listed(shows(2 * MS), 1, [(tensors[0], "")])
        rows.started(shows(3 * MS), tensors)
        for begin, end, host in stretches[rank]:
            what = {"bytes": 1 << 20, "last_host": host}
            rows.phase("LINKS_EXCHANGE", shows(begin * MS), shows(end * MS), **what)
        rows.ended(shows(10 * MS), tensors)
        recording.close()
    traces = load([str(tmp_path)])
    across = summarise_hosts(traces)
    assert across.nbytes == 1.5 * (1 << 20)
    assert across.time == pytest.approx(2000, abs=1)
    assert across.share == pytest.approx(0.2, abs=1e-3)
    assert dict(across.waited_for) == {
        "h1": pytest.approx(500, abs=1),
        "h2": pytest.approx(1500, abs=1),
    }
    assert across.last == {"h2": 2}
    assert summarise(traces)[0].parts["between hosts"] == pytest.approx(2000, abs=1)
    spans = [event for event in merge(traces)["traceEvents"] if event.get("cat") == "LINKS_EXCHANGE"]
    assert [span["args"]["last host"] for span in spans] == ["h1", "h2", "h2"]
    assert main(["summary", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "between hosts ms" in lines[1]
    assert lines[-3:] == [
        "between hosts: 1.50 MiB sent and received in 2.000 ms, 20.0% of the time (means of ranks 0-1)",
        "bytes of host h2 came last in 2 of 2 batches; the exchange until they came took 1.500 ms (mean)",
        "bytes of host h1 came last in 0 of 2 batches; the exchange until they came took 0.500 ms (mean)",
    ]


def test_the_table_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names with brackets are no markup, and the sum stands below a rule."""
    pytest.importorskip("rich")
    recording = Recording(str(tmp_path / "t.json"), 0, 1, Skew())
    recording.turn(0, "layer[bold]w[/bold]", (0, MS, 2 * MS, 3 * MS))
    recording.close()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["summary", str(tmp_path)]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert lines[0].strip() == "time by part: ms, summed over turns, mean of rank 0"
    heading, tensor, rule, total = (line for line in lines if re.match("[┃│├]", line))
    assert re.findall(r"\w+", heading)[:3] == ["tensor", "turns", "MiB"]
    assert re.split("[ │]+", tensor)[1:5] == ["allreduce.layer[bold]w[/bold]", "1", "0.00", "3.000"]
    assert set(rule) == {*"├─┼┤"}
    assert re.split("[ │]+", total)[1:6] == ["all", "together", "1", "0.00", "3.000"]


def test_where_one_rank_alone_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = _record(tmp_path / "t.json")
    for recording in ranks:
        recording.close()
    for recording in ranks[:2]:
        recording.path.unlink()
    assert main(["summary", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "of 3 ranks, there is no file of ranks 0-1" in told.err
    assert told.out.splitlines()[-2].split()[:3] == ["all", "together", "20"]
    assert "was the last to submit" not in told.out


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "merged.json").write_text('{"traceEvents": []}')
    assert main(["summary", str(tmp_path)]) == 1
    assert f"{tmp_path}: no trace files" in capsys.readouterr().err
    assert main(["summary", str(tmp_path / "none")]) == 1
    assert "no such file or directory" in capsys.readouterr().err
    assert main(["summary", str(tmp_path / "merged.json")]) == 1
    assert "merged.json: not a JSON array of trace events" in capsys.readouterr().err


def test_files_that_are_broken_inside(tmp_path: Path) -> None:
    for recording in _record(tmp_path / "t.json", turns=1):
        recording.close()
    path = tmp_path / "t.rank1.json"
    events = json.loads(path.read_text())
    for wrong, says in (
        ([event for event in events if event["name"] != "pyhvd_clock"], "no measurement of the clock"),
        ([{k: v for k, v in event.items() if k != "ts"} for event in events], "incomplete event"),
        ([{**events[0], "args": {**events[0]["args"], "format": 9}}, *events[1:]], "format 9"),
        ([{**events[0], "args": [1]}, *events[1:]], "no header"),
        ([{**events[0], "args": {"format": 1, "job": "job"}}, *events[1:]], "header: .* `rank`"),
        ([{**events[0], "args": {**events[0]["args"], "rank": "1"}}, *events[1:]], r"header: .* `\$\.rank`"),
        ([*events, {"ph": "X"}], "incomplete event: KeyError.*name"),
        ([*events, {"name": "x", "ph": "X", "args": 3}], "incomplete event: TypeError"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(TraceError, match=says) as caught:
            load([str(tmp_path)])
        assert str(path) in str(caught.value)


def test_the_output_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recording in _record(tmp_path / "t.json", turns=1):
        recording.close()
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "none" / "out.json")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_the_output_is_no_file_of_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for recording in _record(tmp_path / "t.json", turns=1):
        recording.close()
    recorded = (tmp_path / "t.json").read_bytes()
    monkeypatch.chdir(tmp_path)
    assert main(["merge", str(tmp_path), "-o", "t.json"]) == 1
    assert "t.json: is a file of the recording" in capsys.readouterr().err
    assert (tmp_path / "t.json").read_bytes() == recorded


@pytest.mark.parametrize(
    ("text", "says"),
    [("few", "expected a whole number, not 'few'"), ("-1", "must not be negative, and is -1")],
)
def test_how_many_tensors(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["summary", ".", "--top", text])
    assert caught.value.code == 2
    assert f"argument --top: {says}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["merge", "--help"], ["summary", "--help"]])
def test_help_shows_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "python -m pyhvd trace merge traces/ -o merged.json" in capsys.readouterr().out
