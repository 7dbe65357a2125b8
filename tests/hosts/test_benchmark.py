"""The benchmark across hosts at tiny sizes: every contender's result is right. No figure is judged."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import hosts, peers, simulation
from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.hosts_ranks import CHUNKS, PIPELINED
from benchmarks.machine import Machine
from benchmarks.raw_tcp import LINK
from benchmarks.report import Run
from tests.bed import why_not
from tests.mpi.launch import mpiexec_path
from tests.mpi.test_benchmarks import run


@pytest.mark.any_mpi
def test_every_question_at_tiny_sizes(tmp_path: Path) -> None:
    if reason := "no mpiexec" if mpiexec_path() is None else why_not("1gbit"):
        pytest.skip(reason)
    run("-m", "benchmarks", "hosts", "--tiny", "--shapes", "2x2", "--results", tmp_path)
    (path,) = tmp_path.glob("hosts-*.json")
    report = json.loads(path.read_text())
    found = {outcome["label"]: outcome for run in report["runs"] for outcome in run["outcomes"]}
    assert len(found) == 14
    for rate in ("", ", 1 Gbit/s", ", 10 Gbit/s"):
        names = {each["name"] for each in found[f"2x2, ResNet-50{rate}"]["figures"]}
        assert names >= {peers.SINGLY, peers.FLAT, CHUNKS, PIPELINED, LINK}


@pytest.mark.any_mpi
def test_every_verb_at_tiny_sizes(tmp_path: Path) -> None:
    if reason := "no mpiexec" if mpiexec_path() is None else why_not("1gbit"):
        pytest.skip(reason)
    run("-m", "benchmarks", "hosts", "verbs", "--tiny", "--shapes", "2x2", "--results", tmp_path)
    (path,) = tmp_path.glob("hosts-verbs-*.json")
    report = json.loads(path.read_text())
    found = [outcome for run in report["runs"] for outcome in run["outcomes"]]
    assert len(found) == 18  # at two rates: four verbs at two sizes, and small broadcasts from each in turn
    assert sum(LINK in {each["name"] for each in outcome["figures"]} for outcome in found) == 8
    assert len(report["verdicts"]) == 4


@pytest.mark.any_mpi
def test_simulated_steps_beside_measured_ones(tmp_path: Path) -> None:
    if reason := "no mpiexec" if mpiexec_path() is None else why_not("1gbit"):
        pytest.skip(reason)
    run("-m", "benchmarks", "simulation", "--tiny", "--shapes", "2x1", "--results", tmp_path)
    (path,) = tmp_path.glob("simulation-*.json")
    report = json.loads(path.read_text())
    (job,) = report["runs"]
    assert len(job["outcomes"]) == len(report["verdicts"]) == 6
    for outcome in job["outcomes"]:
        assert [each["name"] for each in outcome["figures"]] == [simulation.MEASURED, simulation.SIMULATED]


def _run_of(ours: float, peer: float) -> Run:
    machine = Machine("", "", 2, {}, "", "", [0.0], "", "", "", {}, {}, "")
    figures = [Figures.of(peers.SINGLY, OURS, [ours] * 3), Figures.of(peers.RAW, PEER, [peer] * 3)]
    return Run(2, machine, "mpich", [Outcome("2x1, 4 B", 4, "s", figures)], [])


def test_a_simulated_step_is_judged_by_how_far_it_is_off() -> None:
    run = _run_of(0.0, 0.0)
    for label, simulated in (("long", 2e-3), ("short", 0.5e-3), ("near", 1.2e-3)):
        figures = [
            Figures.of(simulation.MEASURED, OURS, [1e-3]),
            Figures.of(simulation.SIMULATED, PEER, [simulated]),
        ]
        run.outcomes.append(Outcome(label, 4, "s", figures))
    del run.outcomes[0]
    found = simulation.verdicts_of([run])
    assert [(round(each.value, 6), each.met) for each in found] == [(2.0, False), (2.0, False), (1.2, True)]
    assert found[1].text == "short: simulated 0.50 times measured"


def test_a_target_takes_the_median_of_the_runs() -> None:
    runs = [[_run_of(3e-5, 1e-5)], [_run_of(1.2e-5, 1e-5)], [_run_of(1.4e-5, 1e-5)]]
    (verdict,) = hosts.verdicts_of(runs)
    assert (round(verdict.value, 6), verdict.met, verdict.moon) == (1.4, True, False)
    assert [round(value, 6) for value in verdict.values] == [3.0, 1.2, 1.4]
    (one,) = hosts.merged(runs)
    assert one.outcomes[0].figures[0].samples == [3e-5] * 3 + [1.2e-5] * 3 + [1.4e-5] * 3


def test_shapes_are_hosts_by_ranks() -> None:
    assert hosts.ranks_of("3x2") == (2, 2, 2)
    for wrong in ("1x2", "9x1", "2", "x", "2x0", "3+1"):
        with pytest.raises(argparse.ArgumentTypeError, match="hosts x ranks"):
            hosts.ranks_of(wrong)
