"""``python -m pyhvd simulate``: its flags, its output, recordings, and the changes that it tries."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from benchmarks.tensors import resnet50
from pyhvd import __main__ as dispatcher
from pyhvd.config import Config
from pyhvd.observe.trace.loading import load
from pyhvd.simulation import Machine, Network, Part, Simulation
from pyhvd.simulation.command import cases, plot
from pyhvd.simulation.command.cases import Case, changes, run_all, usual_step
from pyhvd.simulation.command.gradients import (
    FORWARD,
    Gradients,
    RecordingError,
    from_recording,
    from_sizes,
    parse_sizes,
)
from pyhvd.simulation.command.main import main
from pyhvd.simulation.models import MODELS
from pyhvd.testing import run_ranks
from tests.unit.observe.recordings import MS, Recording, Skew

CPU = 20e-6
FOUR = ["--hosts", "4", "--local-ranks", "2", "--tensors", "8x1MiB", "--compute", "10ms"]


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PYHVD_", "HOROVOD_"))]:
        monkeypatch.delenv(name)


def answered(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Return the JSON of a run."""
    assert main([*argv, "--json"], CPU) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- models and sizes


def test_models_have_the_sizes_of_their_authors() -> None:
    found = {name: (len(counts()), sum(counts())) for name, counts in MODELS.items()}
    assert found == {
        "resnet50": (161, 25_557_032),
        "vgg16": (32, 138_357_544),
        "bert-large": (391, 335_141_888),
        "gpt2": (148, 124_439_808),
        "gpt2-xl": (580, 1_557_611_200),
    }


def test_resnet50_is_that_of_the_benchmarks() -> None:
    assert parse_sizes("resnet50") == [4 * count for count in resnet50()]


def test_sizes() -> None:
    assert parse_sizes("1000x1KiB") == [1024] * 1000
    assert parse_sizes("2x4MB, 64,1KiB") == [4_000_000, 4_000_000, 64, 1024]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("resnet51", "no model 'resnet51' is known: expected one of resnet50, vgg16, bert-large"),
        ("0x4", "'0x4': expected how many gradients, x, and their size"),
        ("10x3", "'3': a gradient of float32 has a multiple of 4 bytes"),
        ("4,0", "'0': a gradient of float32"),
        ("4,,4", "'' is no size"),
    ],
)
def test_sizes_that_cannot_be_read(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_sizes(text)


def test_gradients_come_in_the_backward_pass() -> None:
    parts = from_sizes("x", [4] * 8, compute=3.0).in_parts(4)
    assert [len(part.tensors) for part in parts] == [2, 2, 2, 2]
    assert [part.compute for part in parts] == pytest.approx([3.0 * FORWARD + 0.5, 0.5, 0.5, 0.5])
    assert [each.name for part in parts for each in part.tensors] == [f"gradient.{i}" for i in range(8)]


@pytest.mark.parametrize(("parts", "found"), [(1, 1), (3, 3), (7, 7), (100, 7)])
def test_no_gradient_and_no_time_is_lost_in_parts(parts: int, found: int) -> None:
    gradients = from_sizes("x", [4 * n for n in range(1, 8)], compute=0.1)
    cut = gradients.in_parts(parts)
    assert len(cut) == found
    assert sum(part.compute for part in cut) == pytest.approx(0.1)
    assert [each.nbytes for part in cut for each in part.tensors] == [4 * n for n in range(1, 8)]


def test_without_computing_all_gradients_are_one_part() -> None:
    (part,) = from_sizes("x", [4] * 8, compute=0.0).in_parts(8)
    assert (part.compute, len(part.tensors)) == (0.0, 8)


def test_halved_gradients_stay_whole_floats() -> None:
    halved = from_sizes("x", [4, 8, 12, 1024], compute=1.0).halved()
    assert [each.tensor.nbytes for each in halved.ready] == [4, 4, 8, 512]


# -- flags


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--hosts", "0"], "argument --hosts: '0': expected a whole number, at least 1"),
        (["--cores", "x"], "argument --cores: 'x': expected a whole number, at least 1"),
        (["--steps", "1"], "argument --steps: '1': expected a whole number, at least 2"),
        (["--link", "25"], "argument --link: '25' is no rate: expected"),
        (["--latency", "20"], "argument --latency: '20' is no time: expected"),
        (["--straggler", "1"], "argument --straggler: '1': expected RANK:TIME, as 5:10ms"),
        (["--straggler", "8:1ms"], "argument --straggler: there is no rank 8: expected 0 to 7"),
        (["--lose", "1"], "argument --lose: '1': expected HOST@TIME or HOST@TIME:silent, as 3@1s"),
        (["--lose", "1@1s:loud"], "argument --lose: '1@1s:loud': expected HOST@TIME or HOST@TIME:silent"),
        (["--lose", "4@1s"], "argument --lose: there is no host 4: expected 0 to 3"),
        (["--hosts", "1", "--lose", "0@1s"], "argument --lose: all hosts would be lost: expected 1 or more"),
        (["--lose", "1@9999min"], "argument --lose: "),
        (["--elastic"], "argument --elastic: has an effect only with --lose"),
        (["--timeline", "x"], "argument --timeline: not allowed with argument --tensors"),
        (["--fusion-threshold", "x"], "argument --fusion-threshold: 'x' is no size: expected bytes"),
        (["--hosts", "2000000"], "argument --hosts: all ranks submit 32,000,000 gradients in a step"),
    ],
)
def test_bad_flags(flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main([*FOUR, *flags], CPU)
    assert info.value.code == 2
    assert error in capsys.readouterr().err


def test_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "can_draw", lambda: False)
    monkeypatch.setattr("pyhvd.simulation.command.main.can_draw", lambda: False)
    for argv, error in (
        (["--hosts", "2", "--tensors", "4KiB"], "argument --compute: is missing"),
        (["--hosts", "2"], "one of the arguments --tensors --timeline is required"),
        (["--tensors", "4KiB"], "the following arguments are required: --hosts"),
        ([*FOUR, "--plot", "x.png"], 'argument --plot: needs matplotlib: pip install "pyhvd[plot]"'),
        (
            ["--hosts", "2", "--timeline", "nowhere"],
            "argument --timeline: nowhere: no such file or directory",
        ),
    ):
        with pytest.raises(SystemExit) as info:
            main(argv, CPU)
        assert info.value.code == 2
        assert error in capsys.readouterr().err


def test_a_variable_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYHVD_CHUNK_SIZE", "1")
    with pytest.raises(SystemExit) as info:
        main(FOUR, CPU)
    assert info.value.code == 2
    assert "PYHVD_CHUNK_SIZE='1': expected a number >= 16384" in capsys.readouterr().err


def test_the_dispatcher_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        dispatcher.main(["simulate", "--help"])
    assert info.value.code == 0
    text = capsys.readouterr().out
    assert "--hosts 128 --link 25gbit --latency 20us --tensors resnet50 --compute 80ms" in text
    assert "models: resnet50, vgg16, bert-large, gpt2, gpt2-xl" in text


# -- output


def test_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FOUR, "--straggler", "5:2ms", "--lose", "3@20ms", "--elastic"], CPU) == 0
    text, error = capsys.readouterr()
    assert error == ""
    assert text.startswith(
        """\
4 hosts x 2 ranks, 25 Gbit/s and 20 us between hosts
8 gradients of 8 MiB (8x1MiB), submitted in 8 parts while a step computes 10 ms

where the time of a step goes
part                        ms    share
----------------------  ------  -------
computing               10.250   """
    )
    lines = [re.sub(r"\d+(\.\d+)?", "#", line) for line in text.splitlines()]
    for expected in (
        "waiting for late ranks   #   # %",
        "step                    #  # %",
        "the first step, for which no gradient is cached, takes # ms",
        "reductions run for another # ms while ranks compute",
        "efficiency: # % of one host's, where a step takes # ms",
        "in a step the busiest host sends # MiB of gradients, and exchanges # messages (# KiB) for the"
        " agreement",
        "in a step rank #'s background thread needs # ms of CPU, and the busiest process # ms",
        "what would help",
        "the job loses a host at # ms, in step #; after that",
        "the launcher says: pyhvd: rank # of # on host h# is lost: its agent is gone",
    ):
        assert re.sub(r"\s+", " ", expected) in [re.sub(r"\s+", " ", line) for line in lines], expected
    again = main([*FOUR, "--straggler", "5:2ms", "--lose", "3@20ms", "--elastic"], CPU)
    assert (again, capsys.readouterr().out) == (0, text)


def test_the_parts_of_a_step_are_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, *FOUR, "--straggler", "5:2ms")
    step = found["step"]
    parts = [step[name] for name in ("compute", "late", "agreement", "link", "cpu", "latency")]
    assert sum(parts) == pytest.approx(step["seconds"])
    assert step["compute"] == pytest.approx(0.010 + 0.002 / 8, abs=1e-4)
    assert step["late"] == pytest.approx(0.002 * 7 / 8, abs=1e-4)
    assert found["first_step"]["seconds"] > step["seconds"]
    assert 0.5 < found["efficiency"] < 1.0
    # 2 ranks on each of 4 hosts send and receive 2 x 3/4 of the gradients, or less often whole ones.
    assert step["data_bytes"] > 1.5 * found["gradients"]["nbytes"]


def test_a_straggler_and_a_slow_link_are_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    late = answered(capsys, *FOUR, "--straggler", "5:20ms")["changes"]
    assert late[0]["label"] == "no late ranks"
    assert late[0]["gain"] == pytest.approx(0.6, abs=0.1)
    slow = answered(capsys, *FOUR, "--link", "1gbit")["changes"]
    by_label = {change["label"]: change["gain"] for change in slow}
    assert {"no late ranks", "twice the cores"}.isdisjoint(by_label)
    assert by_label["a link of twice the rate"] == pytest.approx(0.45, abs=0.1)
    assert by_label["half the bytes, as by Compression.fp16"] == pytest.approx(0.45, abs=0.1)
    assert by_label["half the latency"] < 0.01
    assert [change["gain"] for change in slow] == sorted(by_label.values(), reverse=True)


def test_half_the_bytes_need_half_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    whole, half = (answered(capsys, *FOUR, "--link", "1gbit", *more) for more in ([], ["--half"]))
    assert half["gradients"]["nbytes"] == whole["gradients"]["nbytes"] / 2
    assert half["step"]["data_bytes"] == pytest.approx(whole["step"]["data_bytes"] / 2, rel=0.1)


def test_a_silent_host_is_noticed_later(capsys: pytest.CaptureFixture[str]) -> None:
    loud = answered(capsys, *FOUR, "--lose", "3@20ms", "--elastic")
    silent = answered(capsys, *FOUR, "--lose", "3@20ms:silent", "--elastic")
    assert loud["failure"]["noticed"] - 0.02 == pytest.approx(20e-6)
    assert 1.0 < silent["failure"]["noticed"] < 5.25
    for found in (loud, silent):
        restart = found["restart"]
        assert found["failure"]["noticed"] - 0.02 < restart["ended"] <= restart["told"] < restart["wired"]
    assert answered(capsys, *FOUR, "--lose", "3@20ms")["restart"] is None


def test_one_host_has_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "1", "--local-ranks", "2", "--tensors", "4KiB", "--compute", "1ms"], CPU) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "1 host x 2 ranks\n1 gradient of 4 KiB (4KiB), submitted while a step computes 1 ms\n"
    )
    assert "efficiency" not in text
    assert "link of twice" not in text


def test_more_hosts_than_have_links(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--hosts", "65", "--local-ranks", "1", "--tensors", "4x8MiB", "--compute", "1ms"]
    assert main([*argv, "--steps", "2"], CPU) == 0
    text = capsys.readouterr().out
    assert "more than 64 hosts have no links: MPI moves their data" in text
    assert "PYHVD_STAGING_SIZE=16777216" in text
    assert "PYHVD_CHUNK_SIZE" not in text


# -- changes


@pytest.fixture
def gradients() -> Gradients:
    return from_sizes("x", [1 << 20] * 16, compute=0.01)


@pytest.fixture
def case(gradients: Gradients) -> Case:
    return Case(4, 2, tuple(gradients.in_parts(4)), 2, Network(), Machine(), Config(), cpu=CPU)


def test_changes_have_an_effect(case: Case, gradients: Gradients) -> None:
    found = changes(case, gradients, 4)
    assert list(found) == [
        "a link of twice the rate",
        "half the latency",
        "half the bytes, as by Compression.fp16",
        "gradients submitted in 8 parts",
        "gradients submitted in 2 parts",
        "PYHVD_CHUNK_SIZE=1048576",
        "PYHVD_CHUNK_SIZE=65536",
    ]
    crowded = replace(case, machine=Machine(cores=1), late={3: 0.1}, config=Config(fusion_threshold=1 << 20))
    more = set(changes(crowded, gradients, None)) - set(found)
    assert more == {
        "twice the cores",
        "no late ranks",
        "PYHVD_FUSION_THRESHOLD=4194304",
        "PYHVD_FUSION_THRESHOLD=262144",
    }
    assert changes(crowded, gradients, None)["no late ranks"].late is None
    assert changes(crowded, gradients, None)["twice the cores"].machine.cores == 2


def test_large_clusters_try_less(case: Case, gradients: Gradients) -> None:
    found = changes(replace(case, hosts=1250), gradients, 4)
    assert list(found) == [
        "a link of twice the rate",
        "half the latency",
        "half the bytes, as by Compression.fp16",
    ]
    whole = tuple(gradients.in_parts(1))
    assert "PYHVD_STAGING_SIZE=16777216" in changes(replace(case, hosts=1250, parts=whole), gradients, 1)


def test_processes_give_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations that run in processes of their own have the results of those that do not, in order."""
    wanted = [case, replace(case, hosts=2), replace(case, hosts=8)]
    shown: list[tuple[int, int]] = []
    here = run_all(wanted, lambda done, total: shown.append((done, total)))
    monkeypatch.setattr(cases, "_SMALL", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    there = run_all(wanted, lambda done, total: shown.append((done, total)))
    assert there == here
    assert [job.hosts for job in there] == [4, 2, 8]
    assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)] * 2


# -- recordings


def record(folder: Path, steps: int = 4, forward: int = 30 * MS, wait: int = 5 * MS) -> None:
    """Record 3 gradients a step, 10 ms apart, on 2 ranks, with a broadcast before; rank 1 is 3 ms slower."""
    for rank in range(2):
        recording = Recording(str(folder / "t.json"), rank, 2, Skew(ahead=rank * 7 * MS))
        at, number = 10 * MS, 1
        for _ in range(steps):
            at += forward + rank * 3 * MS
            for name, elements in (("c", 100), ("b", 200), ("a", 300)):
                at += 10 * MS
                number += 1
                recording.turn(number, name, (at, at + MS, at + 2 * MS, at + wait), elements)
            at += wait
        recording.close()


def test_a_recording_gives_gradients_and_their_times(tmp_path: Path) -> None:
    record(tmp_path)
    gradients, notes = from_recording("traces", load([str(tmp_path)]))
    assert [(each.tensor.name, each.tensor.nbytes) for each in gradients.ready] == [
        ("c", 400),
        ("b", 800),
        ("a", 1200),
    ]
    # Each gradient's call ends 5 ms after its submission, 5 ms before the next one.
    assert [each.after for each in gradients.ready] == pytest.approx([0.040, 0.045, 0.050], abs=1e-5)
    assert gradients.compute == pytest.approx(0.050, abs=1e-5)
    assert notes == [
        "some gradients were submitted after all earlier ones of their step had ended: the simulation"
        " does not wait between them"
    ]


def test_gradients_in_flight_overlap_with_computing(tmp_path: Path) -> None:
    record(tmp_path, wait=25 * MS)
    gradients, notes = from_recording("traces", load([str(tmp_path)]))
    assert [each.after for each in gradients.ready] == pytest.approx([0.040, 0.050, 0.060], abs=1e-5)
    assert notes == []


def test_another_computing_time_than_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, wait=25 * MS)
    argv = ["--hosts", "2", "--local-ranks", "1", "--timeline", str(tmp_path)]
    recorded = answered(capsys, *argv)["gradients"]
    assert recorded == {
        "source": str(tmp_path),
        "count": 3,
        "nbytes": 2400,
        "compute": pytest.approx(0.060, abs=1e-5),
        "parts": 3,
    }
    assert answered(capsys, *argv, "--compute", "10ms")["step"]["compute"] == pytest.approx(0.01, abs=1e-5)


def test_recordings_without_steps(tmp_path: Path) -> None:
    record(tmp_path, steps=1)
    with pytest.raises(
        RecordingError, match="no steps are seen, as none of 3 names, such as 'a', comes twice"
    ):
        from_recording("traces", load([str(tmp_path)]))
    for trace in (traces := load([str(tmp_path)])):
        trace.turns.clear()
    with pytest.raises(RecordingError, match="traces: no allreduce of all ranks is recorded"):
        from_recording("traces", traces)


def test_a_recording_without_bytes(tmp_path: Path) -> None:
    record(tmp_path)
    traces = load([str(tmp_path)])
    for trace in traces:
        trace.turns[:] = [
            replace(turn, nbytes=0 if turn.key[2] == "b" else turn.nbytes) for turn in trace.turns
        ]
    with pytest.raises(
        RecordingError, match="the bytes of 1 gradients are not recorded, as of 'b': record the"
    ):
        from_recording("traces", traces)


def test_calls_outside_of_steps_are_named(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path / "t.json"), 0, 1, Skew())
    recording.turn(1, "once", (MS, 2 * MS, 3 * MS, 4 * MS))
    for step in range(1, 5):
        at = 10 * step * MS
        recording.turn(2 * step, "w", (at, at + MS, at + 2 * MS, at + 3 * MS))
    recording.close()
    gradients, notes = from_recording("traces", load([str(tmp_path)]))
    assert [each.tensor.name for each in gradients.ready] == ["w"]
    assert gradients.compute == pytest.approx(0.007, abs=1e-5)
    assert notes == ["calls of rank 0 that are not in each step are left out: 1 of allreduce"]


@pytest.mark.parametrize("fast_lane", [True, False])
def test_a_real_recording(tmp_path: Path, fast_lane: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks record a few steps; the simulation has their gradients, with their bytes and in their order."""

    def train() -> None:
        hvd.start_timeline(tmp_path / "t.json")
        hvd.barrier()
        hvd.broadcast(np.zeros(10, np.float32), root_rank=0, name="weights")
        for _ in range(4):
            handles = [hvd.allreduce_async(np.ones(100 * k, np.float32), name=f"w{k}") for k in (3, 2, 1)]
            for handle in handles:
                handle.result()
        hvd.stop_timeline()

    run_ranks(2, train, knobs={"timeline": "DYNAMIC", "fast_lane": fast_lane})
    gradients, _ = from_recording("traces", load([str(tmp_path)]))
    assert [(each.tensor.name, each.tensor.nbytes) for each in gradients.ready] == [
        ("w3", 1200),
        ("w2", 800),
        ("w1", 400),
    ]
    assert 0.0 < gradients.compute < 10.0
    argv = ["--hosts", "2", "--local-ranks", "2", "--timeline", str(tmp_path)]
    assert main(argv, CPU) == 0
    text, notes = capsys.readouterr()
    assert f"3 gradients of 2.34 KiB ({tmp_path}), submitted" in text
    assert "1 of broadcast" in notes


# -- the plot


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Simulation]]]:
    calls: list[tuple[str, list[Simulation]]] = []
    monkeypatch.setattr("pyhvd.simulation.command.main.can_draw", lambda: True)
    monkeypatch.setattr(
        "pyhvd.simulation.command.main.draw", lambda path, title, jobs: calls.append((title, jobs))
    )
    return calls


def test_the_plot_shows_fewer_hosts_too(
    drawn: list[tuple[str, list[Simulation]]], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--hosts", "5", "--local-ranks", "2", "--tensors", "8x1MiB", "--compute", "10ms"]
    assert main([*argv, "--plot", "x.png"], CPU) == 0
    ((title, jobs),) = drawn
    assert title.startswith("1 to 5 hosts x 2 ranks, 25 Gbit/s")
    assert [job.hosts for job in jobs] == [1, 2, 4, 5]
    assert [job.local_ranks for job in jobs] == [2] * 4
    assert usual_step(jobs[0]).seconds < usual_step(jobs[1]).seconds
    assert capsys.readouterr().out.endswith("\nx.png: the same for 1, 2, 4, 5 hosts\n")


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "scaling.png"
    parts = (Part(0.01, from_sizes("x", [1 << 20], 0.0).in_parts(1)[0].tensors),)
    case = Case(1, 2, parts, 2, Network(), Machine(), Config(), cpu=CPU)
    plot.draw(path, "a title", [replace(case, hosts=hosts).simulate() for hosts in (1, 2, 3)])
    assert path.read_bytes().startswith(b"\x89PNG")
