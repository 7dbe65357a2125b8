"""Timelines, metrics and output files of elastic jobs."""

from __future__ import annotations

from pathlib import Path

from pyhvd.observe.trace.loading import load
from tests.elastic.jobs import check_finished, finish, run, start, wait_for_step
from tests.many_hosts import LOCAL, Launcher

_SHOWS_METRICS = """
import os, signal
import numpy as np, pyhvd as hvd

hvd.init()
state = hvd.elastic.ObjectState(step=0)

@hvd.elastic.run
def train(state):
    while state.step < 5:
        hvd.allreduce(np.ones(4), name="first")
        state.step += 1
        state.commit()
        if state.step == 2 and hvd.elastic.generation() == 0 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
print("generation", hvd.metrics().generation, flush=True)
"""


def test_each_generation_has_timelines_of_its_own(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    flags = ("-n", "2", "--min-np", "2", "--timeline-filename", f"{traces}/")
    check_finished(run(tmp_path, "func:0:1", flags=flags))
    names = ["timeline", "timeline.rank1", "timeline.generation1", "timeline.generation1.rank1"]
    assert {path.name for path in traces.iterdir()} == {f"{name}.json" for name in names}
    for number, name in enumerate(names[::2]):
        found = load([str(traces / f"{name}.json")])
        assert [(each.rank, each.generation) for each in found] == [(0, number), (1, number)]


def test_metrics_know_the_generation(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    ended = launcher.run("--min-np", "2", launcher.script(_SHOWS_METRICS), hosts="h1:1,h2:1")
    assert ended.code == 0, ended
    assert ended.out.count("generation 1\n") == 2, ended


def test_ranks_by_which_a_job_grows_have_files(tmp_path: Path) -> None:
    """Each generation appends to the files of the one before."""
    hosts, script = tmp_path / "hosts", tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o700)
    hosts.write_text("east:1\n")
    flags = ["--min-np", "1", "--host-discovery-script", str(script), "--launch-agent", LOCAL]
    job = start(tmp_path, flags=[*flags, "--output-filename", "out"], env={"STEP_S": "0.1", "SAYS": "1"})
    wait_for_step(job, tmp_path, 3)
    hosts.write_text("east:1\nwest:2\n")
    ended = finish(job, tmp_path)
    check_finished(ended)
    sizes = [line.words[3] for line in ended.of("begin")]
    assert sizes == ["1", "3"], ended
    said = {path.parent.name: path.read_text() for path in tmp_path.glob("out/*/stdout")}
    assert said == {
        "rank.0": "rank 0 of generation 0\nrank 0 of generation 1\n",
        "rank.1": "rank 1 of generation 1\n",
        "rank.2": "rank 2 of generation 1\n",
    }
