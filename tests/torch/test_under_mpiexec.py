"""Ranks that are processes. Each name of Horovod's test_torch.py has a test of our own, through the alias.

The ranks of a size run all situations of these names in one job. A situation that fails or hangs ends its
job, and the next one begins another. Tests that share jobs are in this file: pytest-xdist keeps it together.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import pyhvd.torch as hvd
from tests.mpi.harness import SharedJobs, on_ranks
from tests.mpi.launch import ROOT
from tests.mpi.test_docs_code import BLOCKS
from tests.torch import test_optimizer as optimizers
from tests.torch.names import run as on_rank

# Horovod's names without "test_", and of a verb without "horovod_<verb>_"; "-" is the verb alone.
_OF_VERBS = {
    "allreduce": "- average min max product inplace async_fused prescale postscale process_sets grad"
    " grad_average grad_process_sets error type_error duplicate_name_error cpu_gpu_error multi_gpu",
    "grouped_allreduce": "- average inplace process_sets grad grad_average grad_process_sets cpu_gpu_error",
    "allgather": "- variable_size async_fused process_sets grad grad_process_sets error type_error"
    " duplicate_name_error",
    "grouped_allgather": "- process_sets grad",
    "broadcast": "- inplace process_sets grad grad_process_sets error type_error rank_error"
    " duplicate_name_error",
    "alltoall": "- equal_split process_sets grad equal_split_grad grad_process_sets type_error rank_error"
    " equal_split_length_error splits_error splits_type_error splits_on_gpu",
    "reducescatter": "- average prescale postscale async_fused process_sets grad grad_average"
    " grad_process_sets scalar_error adasum error type_error duplicate_name_error",
    "grouped_reducescatter": "- average prescale postscale process_sets grad scalar_error",
}
_OTHERS = (
    "rank size reinit is_initialized join_allreduce join_allgather join_broadcast global_barrier_op"
    " process_set_barrier_op barrier_with_multiple_collectives broadcast_state broadcast_state_options"
    " broadcast_state_no_grad broadcast_object broadcast_object_process_sets allgather_object"
    " compression_fp16 force_allreduce dynamic_requires_grad gradient_clipping synchronize_step_warning"
    " duplicate_names no_named_parameters missing_named_parameters optimizer_no_named_parameters"
    " optimizer_process_sets sparse_embeddings async_sparse_allreduce async_sparse_allreduce_process_sets"
    " gpu_required delta_optimizer sync_batch_norm model_parallelism broadcast_state_gpu timeline_api"
)
NAMES = sorted(
    [f"{verb}_{name}".removesuffix("_-") for verb, names in _OF_VERBS.items() for name in names.split()]
    + _OTHERS.split()
)
SECONDS = 120.0
# As Horovod's CI has it.
_ENVIRONMENT = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": "DYNAMIC"}


class Outcomes:
    """The outcomes of all situations that this session has chosen, by size and name."""

    def __init__(self, jobs: SharedJobs, chosen: dict[int, list[str]], folder: Path) -> None:
        self._jobs, self._chosen, self._folder = jobs, chosen, folder
        self._known: dict[int, dict[str, tuple[str, str]]] = {}

    def get(self, size: int, name: str) -> tuple[str, str]:
        """Return whether a situation passed, failed or was skipped, and the text."""
        if size not in self._known:
            self._known[size] = self._run_all(size, self._chosen[size])
        return self._known[size][name]

    def _run_all(self, size: int, names: list[str]) -> dict[str, tuple[str, str]]:
        known: dict[str, tuple[str, str]] = {}
        for number in itertools.count():
            left = [name for name in names if name not in known]
            if not left:
                break
            folder = self._folder / f"{size}-{number}"
            folder.mkdir()
            arguments = {"names": left, "folder": str(folder)}
            report = self._jobs.run(size, on_rank.run, arguments, timeout=SECONDS, env=_ENVIRONMENT)
            if report.outcome == "skipped":
                return dict.fromkeys(names, ("skipped", report.text))
            passed = _read(folder, size)
            known.update(passed)
            if report.outcome == "failed":
                known[left[min(len(passed), len(left) - 1)]] = ("failed", report.text)
        return known


def _read(folder: Path, size: int) -> dict[str, tuple[str, str]]:
    """Return the outcomes of the situations that all ranks have ended."""
    files = [folder / f"rank{rank}" for rank in range(size)]
    by_rank = [file.read_text().splitlines() if file.exists() else [] for file in files]
    outcomes = {}
    for lines in zip(*by_rank, strict=False):
        name, reason = json.loads(lines[0])
        alike = len(set(lines)) == 1
        text = reason if alike else f"not all ranks skipped for the same reason: {lines}"
        outcomes[name] = ("failed" if not alike else "skipped" if reason else "passed", text)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, shared_jobs: SharedJobs, tmp_path_factory: pytest.TempPathFactory
) -> Outcomes:
    chosen: dict[int, list[str]] = defaultdict(list)
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == "test_name":
            size, name = (item.callspec.params[key] for key in ("size", "name"))
            assert isinstance(size, int)
            chosen[size].append(str(name))
    return Outcomes(shared_jobs, chosen, tmp_path_factory.mktemp("names"))


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_name(size: int, name: str, outcomes: Outcomes) -> None:
    outcome, text = outcomes.get(size, name)
    if outcome == "skipped":
        pytest.skip(text)
    assert outcome == "passed", text


def test_all_names_have_a_situation() -> None:
    assert len(NAMES) == len(set(NAMES)) == 115
    assert set(NAMES) == set(on_rank.find_situations())


@on_ranks(1, 2, 4, timeout=120)
def test_training_keeps_the_ranks_alike() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = optimizers.make_model(hvd.rank())
    optimizer = hvd.DistributedOptimizer(optimizers.sgd(model), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizers.train(model, optimizer, 5)
    for parameter in model.parameters():
        rows = hvd.allgather(parameter.detach().reshape(1, -1))
        assert all(torch.equal(row, rows[0]) for row in rows)


@on_ranks(2, timeout=120)
def test_verbs_and_gradients() -> None:
    hvd.init()
    for _ in range(4):
        leaf = torch.full((3,), hvd.rank() + 1.0, requires_grad=True)
        out = hvd.allreduce(leaf, name="x", op=hvd.Sum)
        assert out.tolist() == [3.0] * 3
        torch.autograd.backward(out.sum())
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2.0] * 3
        images = torch.ones(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        assert hvd.allreduce_(images, name="images", op=hvd.Sum).sum() == 240


@on_ranks(2, timeout=120)
def test_compiled_models_and_forked_children() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = optimizers.make_model()
    optimizer = hvd.DistributedOptimizer(optimizers.sgd(model), model.named_parameters())
    optimizers.train(torch.compile(model, backend="eager"), optimizer)
    optimizers.check_weights(model, optimizers.expect(optimizers.sgd))
    child = os.fork()
    if child == 0:
        try:
            torch.autograd.backward(optimizers.loss_of(model, 0, 0))  # it reduces nothing
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    optimizers.train(model, optimizer)
    optimizers.check_alike(model.parameters())


@on_ranks(2, timeout=120)
def test_benchmarks_do_not_take_pyhvd_for_horovod() -> None:
    from benchmarks import peers

    notes: list[str] = []
    sys.path.insert(0, str(ROOT / "compat" / "horovod"))
    try:
        assert peers.load_horovod(cast("Any", SimpleNamespace(note=notes.append))) is None
    finally:
        sys.path.pop(0)
    assert notes == ["Horovod: not installed; import horovod finds pyhvd under its name"]


@on_ranks(2, timeout=120)
def test_the_programs_of_the_page() -> None:
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if block.path.name == "torch.md" and block.tags[:1] == ("python",):
            exec(block.code, names)
    optimizers.check_alike(names["model"].parameters())
