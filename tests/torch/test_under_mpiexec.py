"""Ranks that are processes. Each name of Horovod's test_torch.py has a test of our own, through the alias.

The ranks of a size run all situations of these names in one job. A situation that fails or hangs ends its
job, and the next one begins another. Tests that share jobs are in this file: pytest-xdist keeps it together.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import warnings
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
from tests.torch import (
    test_joins as joins,
    test_late_rounds as late_rounds,
    test_loops as loops,
    test_optimizer as optimizers,
    test_sync_batch_norm as batch_norms,
)
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


@on_ranks(2, 3, 4, timeout=120)
def test_loops_that_people_write() -> None:
    hvd.init()
    loops.compare(loops.scaled, hvd.size())
    loops.compare(loops.changing(loops.scale_numpy), hvd.size())
    for situation in ("plain", "sparse", "unfrozen"):
        loops.train_over_epochs(situation)
    with pytest.raises(hvd.MismatchError, match=r"rank 1: 2 steps, 4 calls of zero_grad\(\)"):
        loops.leave_out_a_batch({})


@on_ranks(2, 3, timeout=120)
def test_rounds_that_a_rank_has_in_its_step() -> None:
    hvd.init()
    for kind in ("allreduce", "handle", "barrier"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            late_rounds.train_with_gaps(hvd.size(), kind, {})


@on_ranks(3, 4, timeout=120, env={"PYHVD_DYNAMIC_PROCESS_SETS": "1"})
def test_joins_and_layers_in_a_set() -> None:
    batch_norms.use_used_layers("init")
    batch_norms.use_layers_in_a_set()
    hvd.shutdown()
    hvd.init()
    joins.train_in_a_set(uneven=True)


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


class Image(torch.Tensor):
    """A class of the program."""


@on_ranks(3, 4, timeout=120)
def test_tensors_of_a_derived_class() -> None:
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    for _ in range(3):
        rows = torch.full((1 + rank, 2), 1.0, dtype=torch.bfloat16).as_subclass(Image)
        gathered = hvd.allgather(rows, name="rows")  # uneven
        assert (type(gathered), gathered.dtype) == (torch.Tensor, torch.bfloat16)
        assert gathered.shape == (size * (size + 1) // 2, 2)
        leaf = torch.full((3,), rank + 1.0, requires_grad=True)
        out = hvd.allreduce(leaf.as_subclass(Image), name="x", op=hvd.Sum, compression=hvd.Compression.bf16)
        torch.autograd.backward(out.sum())
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [float(size)] * 3
        saved = leaf.exp()
        hvd.allreduce_(saved.detach().as_subclass(Image), name="saved", op=hvd.Sum)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(saved.sum())
    if rank == 1:
        with pytest.raises(TypeError, match=r"torch\.func"):
            torch.func.grad(lambda x: hvd.allreduce(x, name="x").sum())(torch.ones(3))
    else:
        with pytest.raises(hvd.RankFailedError, match=r"torch\.func"):
            hvd.allreduce(torch.ones(3), name="x")
    hvd.barrier()


@on_ranks(3, 4, timeout=120)
def test_optimizer_state_of_bfloat16_weights() -> None:
    """All ranks of a process set have its root's state, bit by bit, whatever they had before."""
    members = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[members])
    rank = hvd.rank()
    for group, root in ((hvd.global_process_set, 1), (members, 2)):
        if not group.included():
            continue
        weights = [torch.nn.Parameter(torch.ones(3, 2).bfloat16()) for _ in range(2)]
        optimizer: Any = torch.optim.NAdam(weights, lr=torch.tensor(0.01 * (1 + rank)), foreach=False)
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=group)
        for weight in weights[: 1 + rank % 2]:  # ranks have state of one weight, or of both
            optimizer.state[weight] = {
                "step": torch.tensor(3.0),
                "mu_product": torch.tensor(0.1 + rank),
                "exp_avg": torch.rand(3, 2, dtype=torch.float64),
                "exp_avg_sq": torch.rand(2, 3).t(),
            }
        kept = dict(optimizer.state[weights[0]]), optimizer.param_groups[0]["lr"]
        hvd.broadcast_optimizer_state(optimizer, root, process_set=group)
        found = [
            {name: (str(each.dtype), each.tolist()) for name, each in optimizer.state.get(weight, {}).items()}
            for weight in weights
        ]
        rate = optimizer.param_groups[0]["lr"]
        first, *others = hvd.allgather_object((found, rate.item()), process_set=group)
        assert all(each == first for each in others)
        assert (found[0]["exp_avg"][0], bool(found[1])) == ("torch.float64", root == 1)
        assert rate is kept[1]
        assert all(optimizer.state[weights[0]][name] is each for name, each in kept[0].items())
    hvd.barrier()


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


def _run_blocks(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page one after the other; return their names."""
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if block.path.name == page and block.tags[:1] == ("python",):
            exec(block.code, names)
    return names


@on_ranks(2, timeout=120)
def test_the_programs_of_the_page() -> None:
    optimizers.check_alike(_run_blocks("torch.md")["model"].parameters())


@on_ranks(2, timeout=120)
def test_the_recipe_goes_on_after_the_last_whole_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was interrupted, and one that was not, come to the same weights."""

    def set_epoch(sampler: Any, epoch: int) -> None:
        if epoch == 5:
            raise KeyboardInterrupt
        of_torch(sampler, epoch)

    of_torch = torch.utils.data.DistributedSampler.set_epoch
    hvd.init()
    with tempfile.TemporaryDirectory() as own:
        for folder in ("whole", "interrupted"):
            Path(own, folder).mkdir()
        shared = hvd.broadcast_object(own, 0)
        monkeypatch.setenv("CHECKPOINTS", f"{shared}/whole")
        whole = _run_blocks("torch_recipe.md")
        monkeypatch.setenv("CHECKPOINTS", f"{shared}/interrupted")
        with monkeypatch.context() as patched:
            patched.setattr(torch.utils.data.DistributedSampler, "set_epoch", set_epoch)
            with pytest.raises(KeyboardInterrupt):
                _run_blocks("torch_recipe.md")
        resumed = _run_blocks("torch_recipe.md")
        hvd.barrier()
    assert (whole["first"], resumed["first"]) == (0, 5)
    assert resumed["hits"] / resumed["count"] > 0.9
    for one, other in zip(whole["model"].parameters(), resumed["model"].parameters(), strict=True):
        assert torch.equal(one, other)
    optimizers.check_alike(resumed["model"].parameters())
