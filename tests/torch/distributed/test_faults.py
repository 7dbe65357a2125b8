"""Ranks that die or stand still are named in the others' errors; pending works do not hold a process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.launch import ROOT, MpiRun, run_mpi
from tests.mpi.run_support import Ended, pyhvdrun, script
from tests.torch.distributed.world import needs_fully_shard

WITHIN_S = 6.0
PLACES = ["ddp", pytest.param("fsdp", marks=needs_fully_shard), "recv"]
STALLS = {"PYHVD_STALL_CHECK_TIME_SECONDS": "0.5", "PYHVD_STALL_SHUTDOWN_TIME_SECONDS": "1"}

FAILING = """\
    import os, signal, sys, time

    import torch
    import torch.distributed as dist

    import pyhvd.torch.distributed
    from tests.torch.distributed.world import loss_of, batch, make_model, place_of, sgd, train

    where, how, late = sys.argv[1], getattr(signal, sys.argv[2]), int(sys.argv[3])
    if where == "fsdp":  # before the others can wait for it
        from torch.distributed.fsdp import fully_shard
    rank, size = place_of()
    dist.init_process_group("pyhvd", init_method=f"file://{__file__}.store", rank=rank, world_size=size)

    def fail(*_):
        time.sleep(0.3)
        os.write(1, f"failed at {time.time()}, pid {os.getpid()}\\n".encode())
        os.kill(os.getpid(), how)

    def run_ddp():
        model = torch.nn.parallel.DistributedDataParallel(make_model())
        train(model, sgd(model), steps=2)
        if rank == late:
            model.module[2].weight.register_hook(fail)
        train(model, sgd(model), steps=1)

    def run_fsdp():
        model = make_model()
        fully_shard(model[2])
        fully_shard(model)
        train(model, sgd(model), steps=2)
        if rank == late:
            model[1].register_forward_hook(fail)
        train(model, sgd(model), steps=1)

    def run_recv():
        if rank == late:
            fail()
        dist.recv(torch.ones(3), late)

    dist.barrier()
    try:
        {"ddp": run_ddp, "fsdp": run_fsdp, "recv": run_recv}[where]()
    except RuntimeError as exc:
        os.write(1, f"learned at {time.time()}\\nrank {rank}: {exc}\\n".encode())
        raise
"""


def time_of(what: str, out: str) -> float:
    """Return the time of a line ``what at TIME``; the first rank's."""
    return min(float(found) for found in re.findall(rf"{what} at ([\d.]+)", out))


def run_failing(folder: Path, launched: bool, *arguments: Any) -> Ended | MpiRun:
    path = script(folder, FAILING)
    environment = {**STALLS, "PYTHONPATH": str(ROOT)}
    if launched:
        return pyhvdrun("-n", 2, path, *arguments, env=environment)
    return run_mpi(2, [sys.executable, path, *map(str, arguments)], env=environment, timeout=60)


@pytest.mark.parametrize(
    ("where", "late", "launched"),
    [
        ("ddp", 1, True),
        ("ddp", 0, False),
        pytest.param("fsdp", 0, True, marks=needs_fully_shard),
        pytest.param("fsdp", 1, False, marks=needs_fully_shard),
        ("recv", 1, True),
        ("recv", 0, False),
    ],
)
def test_a_frozen_rank_is_named(tmp_path: Path, where: str, late: int, launched: bool) -> None:
    ended = run_failing(tmp_path, launched, where, "SIGSTOP", late)
    out, err = (ended.out, ended.err) if isinstance(ended, Ended) else (ended.stdout, ended.stderr)
    assert "learned at" in out, out + err
    assert time_of("learned", out) - time_of("failed", out) < WITHIN_S
    told = out.partition(f"rank {1 - late}: ")[2]
    assert re.search(rf"rank {late}\b", told), told
    assert (ended.code if isinstance(ended, Ended) else ended.returncode) not in (0, None)


@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
@pytest.mark.parametrize("where", PLACES)
def test_a_killed_rank_is_named(tmp_path: Path, where: str, launched: bool) -> None:
    """By the launcher, which ends the job: mpiexec knows the process, and pyhvdrun the rank."""
    ended = run_failing(tmp_path, launched, where, "SIGKILL", 1)
    if isinstance(ended, Ended):
        assert ended.code != 0
        assert re.search(r"rank 1\b.* was killed by SIGKILL", ended.err), ended.err
        assert ended.at - time_of("failed", ended.out) < WITHIN_S
        return
    assert ended.returncode not in (0, None), ended.stderr
    pid = re.search(r"failed at [\d.]+, pid (\d+)", ended.stdout)
    assert pid, ended.stdout
    assert f"PID {pid[1]} " in ended.stdout + ended.stderr


PENDING = """\
    import sys, time

    import torch
    import torch.distributed as dist

    import pyhvd.torch.distributed
    from tests.torch.distributed.world import place_of

    rank, size = place_of()
    dist.init_process_group("pyhvd", init_method=f"file://{__file__}.store", rank=rank, world_size=size)
    dist.barrier()
    pending = sys.argv[1]
    if rank == 1:
        time.sleep(2)  # the other rank is first
    else:
        if pending == "recv":
            work = dist.irecv(torch.ones(3), 1)
        elif pending == "send":
            work = dist.isend(torch.ones(3), 1)
        else:
            work = dist.all_reduce(torch.ones(3), async_op=True)
        if pending == "future":
            future = work.get_future().then(print)
    print("ended")
"""


@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
@pytest.mark.parametrize("pending", ["collective", "future", "recv", "send"])
def test_exit_with_a_pending_work(tmp_path: Path, pending: str, launched: bool) -> None:
    path = script(tmp_path, PENDING)
    environment = {"PYTHONPATH": str(ROOT)}
    if launched:
        ended = pyhvdrun("-n", 2, path, pending, env=environment)
        code, out, err = ended.code, ended.out, ended.err
    else:
        run = run_mpi(2, [sys.executable, path, pending], env=environment, timeout=40)
        code, out, err = run.returncode or int(run.timed_out), run.stdout, run.stderr
    assert code == 0, err
    assert out.count("ended") == 2
    assert "Traceback" not in err, err
