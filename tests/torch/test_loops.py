"""Training loops that people write: right as in one process with all batches, or one error on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pyhvd.torch as hvd
from pyhvd.testing import RanksFailed, run_ranks
from pyhvd.torch import reducer
from tests.torch.test_optimizer import Branches, batch, check_weights, make_model, sgd, train

Loop = Callable[[Any, Any, Sequence[int]], None]
PLACES = r"gradients.0: the ranks are at different places of their training loops: "


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small models have several buckets, as large ones have."""
    monkeypatch.setattr(reducer, "_BUCKET_BYTES", 300)


def loss_of(model: Any, step: int, ranks: Sequence[int]) -> Any:
    losses = [((model(given) - wanted) ** 2).mean() for given, wanted in (batch(step, r) for r in ranks)]
    return sum(losses[1:], losses[0]) / len(ranks)


def check(loop: Loop, size: int, make: Callable[[Any], Any] = sgd, **options: Any) -> None:
    """Check that a loop gives the ranks the weights that it gives one process with all batches."""
    in_set = options.get("in_set", False)
    run_ranks(size + in_set, compare, loop, size, make, options, knobs={"dynamic_process_sets": True})


def compare(loop: Loop, size: int, make: Callable[[Any], Any] = sgd, options: dict[str, Any] = {}) -> None:  # noqa: B006
    """Check on one rank what :func:`check` does; the last rank is outside of a set."""
    alone, model = make_model(), make_model()
    loop(alone, make(alone), range(size))
    given = dict(options)
    if given.pop("in_set", False):
        given["process_set"] = hvd.add_process_set(range(size))
    if hvd.rank() < size:
        optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), **given)
        loop(model, optimizer, [hvd.rank()])
        check_weights(model, [each.detach() for each in alone.parameters()])
    hvd.barrier()


def check_alike(model: Any) -> None:
    for parameter in model.parameters():
        rows = hvd.allgather(parameter.detach().reshape(1, -1))
        assert all(torch.equal(row, rows[0]) for row in rows)


# -- gradients that the program changes ----------------------------------------------------------------


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clamp_data(model: Any) -> None:
    for each in model.parameters():
        each.grad.data.clamp_(-0.01, 0.01)


def scale_numpy(model: Any) -> None:
    for each in model.parameters():
        array = each.grad.numpy()
        array *= abs(array).max()


def replace_data(model: Any) -> None:
    for each in model.parameters():
        each.grad.data = each.grad.sign()


def replace(model: Any) -> None:
    for each in model.parameters():
        each.grad = each.grad * each.grad.norm()


CHANGES = [clip, clamp_data, scale_numpy, replace_data, replace]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": 2},
    "in a set": {"in_set": True},
    "zeros": {"unused": "zeros"},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_may_be_changed_after_the_backward_pass(
    size: int, options: str, change: Callable[[Any], None]
) -> None:
    check(changing(change), size, **OPTIONS[options])


def changing(change: Callable[[Any], None]) -> Loop:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step, ranks))
            change(model)
            optimizer.step()

    return loop


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@pytest.mark.parametrize("change", [*CHANGES, torch.nn.Module.zero_grad])
@pytest.mark.parametrize("size", [2, 3])
def test_where_step_reduces_a_changed_gradient_is_an_error_on_all_ranks(
    size: int, change: Callable[[Any], None]
) -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), reduce_at="step")
        train(model, optimizer, 1)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, 1, [hvd.rank()]))
        if hvd.rank() == size - 1:
            change(model)
        text = rf"rank {size - 1}: 1 step, 2 calls of zero_grad\(\), and has changed the gradient of '0\.\w+'"
        with pytest.raises(hvd.MismatchError, match=text):
            optimizer.step()
        train(model, optimizer, 1, first=2)

    run_ranks(size, body)


def test_compression_and_clipping() -> None:
    def body() -> None:
        model = make_model()
        optimizer = sgd(model)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=hvd.Compression.bf16
        )
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step, [hvd.rank()]))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert hvd.allgather(norm.reshape(1)).unique().numel() == 1
            optimizer.step()
        check_alike(model)

    run_ranks(2, body, timeout=20.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_scaler_needs_no_synchronize(size: int, fused: bool) -> None:
    check(scaled, size, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))


def scaled(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
    """Train with a scaler; rank 1 alone finds an infinity, and all ranks leave out the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step, ranks)
        if step == 1 and 1 in ranks:
            loss = loss * float("inf")
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [16.0, 8.0, 8.0, 8.0]


def test_hooks_of_the_program_change_gradients_before_they_are_reduced() -> None:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        def halve(parameter: Any) -> None:
            parameter.grad.data.mul_(0.5)

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(halve)
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step, ranks))
            optimizer.step()

    check(loop, 2)


def test_optimizers_that_step_in_the_backward_pass() -> None:
    def body() -> None:
        alone, model = make_model(), make_model()
        optimizer = sgd(alone)
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(alone, step, range(2)))
            optimizer.step()
        for name, each in model.named_parameters():
            one = hvd.DistributedOptimizer(torch.optim.SGD([each], lr=0.1, momentum=0.9), [(name, each)])

            def step_at_once(_: Any, one: Any = one) -> None:
                one.step()
                one.zero_grad()

            each.register_post_accumulate_grad_hook(step_at_once)
        for step in range(3):
            torch.autograd.backward(loss_of(model, step, [hvd.rank()]))
        check_weights(model, [each.detach() for each in alone.parameters()])

    run_ranks(2, body, timeout=20.0)


# -- several backward passes ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_several_backward_passes_before_a_step(size: int) -> None:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for each in (2 * step, 2 * step + 1):
                torch.autograd.backward(loss_of(model, each, ranks))
                clip(model)
            optimizer.step()

    check(loop, size)


def test_several_reductions_in_a_step_beside_a_joined_rank_are_an_error() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        if hvd.rank() < 2:
            with optimizer.no_sync():
                torch.autograd.backward(loss_of(model, 0, [hvd.rank()]))
            train(model, optimizer, 1)
            torch.autograd.backward(loss_of(model, 1, [hvd.rank()]))
            with pytest.raises(hvd.MismatchError, match=r"ranks 0-1: .*while a rank has joined: use no_sync"):
                torch.autograd.backward(loss_of(model, 2, [hvd.rank()]))
        hvd.join()

    run_ranks(3, body)


def test_losses_of_different_parts_of_a_model_in_any_order() -> None:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            losses = [each.weight.pow(2).sum() * (1 + step) for each in (model[0], model[4])]
            for each in losses if ranks[0] % 2 == 0 else losses[::-1]:
                torch.autograd.backward(each)
            optimizer.step()

    check(loop, 2)


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")  # torch 2.4 does itself
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        def forward(given: Any) -> Any:
            given.requires_grad_(True)
            for part in (model[:2], model[2:4], model[4:]):
                given = checkpoint(part, given, use_reentrant=reentrant)
            return given

        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(forward, step, ranks))
            clip(model)
            optimizer.step()

    check(loop, 2)


def test_gradients_that_the_program_assigns() -> None:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model[:4], 0, ranks) if step == 1 else loss_of(model, 0, ranks))
            if step == 1:
                for each in model[4].parameters():
                    each.grad = torch.full_like(each, sum(ranks) / len(ranks))
            optimizer.step()

    def shortened(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        with torch.no_grad():
            model[2].weight[2:] = 0.0
        loop(model, optimizer, ranks)

    def loss_of(model: Any, step: int, ranks: Sequence[int]) -> Any:
        return sum((model(batch(step, rank)[0]) ** 2).mean() for rank in ranks) / len(ranks)

    check(shortened, 2)


@pytest.mark.parametrize("unused", ["none", "zeros"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_with_unused_parameters_reduces_a_metric_before_its_step(size: int, unused: str) -> None:
    def body() -> None:
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), unused=unused)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2), 0)
            if hvd.rank():
                loss = loss + model(torch.ones(1, 2), 1)
            torch.autograd.backward(loss)
            hvd.allreduce(loss.detach(), name="metric")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        check_alike(model)

    run_ranks(size, body)


# -- steps that ranks leave out ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reduce_at": "step"}, {"op": hvd.Adasum}, {"groups": 2}])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_leaves_out_a_batch_is_an_error_in_that_step(size: int, options: dict[str, Any]) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(size, leave_out_a_batch, options)
    assert sorted(failed.value.errors) == list(range(size))
    others = "rank 0" if size == 2 else "ranks 0, 2-3"
    for error in failed.value.errors.values():
        text = str(error)
        assert text.startswith(
            "gradients.0: the ranks are at different places of their training loops:"
            f" {others}: 2 steps, 3 calls of zero_grad(); rank 1: 2 steps, 4 calls of zero_grad()."
        )
        assert "op=hvd.Max" in text
        assert "hvd.join()" in text


def leave_out_a_batch(options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    for step in range(5):
        optimizer.zero_grad()
        if step == 2 and hvd.rank() == 1:
            continue
        torch.autograd.backward(loss_of(model, step, [hvd.rank()]))
        optimizer.step()


def test_a_step_that_one_rank_leaves_out_is_an_error_in_the_next_one() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for step in range(2):
            model.zero_grad()
            torch.autograd.backward(loss_of(model, step, [hvd.rank()]))
            if hvd.rank() == 0 or step:
                optimizer.step()

    text = rf"{PLACES}rank 0: 1 step, 0 calls[^;]*; rank 1: 0 steps"
    with pytest.raises(RanksFailed, match=text) as failed:
        run_ranks(2, body)
    assert sorted(failed.value.errors) == [0, 1]


class Failing(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Any) -> Any:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise torch.OutOfMemoryError("simulated")


@pytest.mark.parametrize("after", ["zero_grad", "backward"])
@pytest.mark.parametrize("first", [False, True])
def test_a_backward_pass_that_fails_on_one_rank_is_an_error_on_all(first: bool, after: str) -> None:
    def fail(model: Any) -> None:
        values = model[:2](batch(0, 0)[0])
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.backward(model[2:](Failing.apply(values)).sum())

    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        if not first:
            train(model, optimizer, 2)
        for step in (2, 3):
            if after == "zero_grad":
                optimizer.zero_grad()
            else:
                model.zero_grad()
            if step == 2 and hvd.rank() == 1:
                fail(model)
                continue
            torch.autograd.backward(loss_of(model, step, [hvd.rank()]))
            optimizer.step()

    if first and after == "backward":
        # The failed pass has left no trace, and this rank's only step is the other's first.
        with pytest.raises(RanksFailed):
            run_ranks(2, body, timeout=5.0)
        return
    with pytest.raises(RanksFailed, match=PLACES) as failed:
        run_ranks(2, body)
    assert sorted(failed.value.errors) == [0, 1]
    assert all(isinstance(each, hvd.MismatchError) for each in failed.value.errors.values())


def test_a_backward_pass_that_fails_on_all_ranks_is_left_out() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        train(model, optimizer, 2)
        for _ in range(2):
            optimizer.zero_grad()
            with pytest.raises(torch.OutOfMemoryError):
                torch.autograd.backward(model[2:](Failing.apply(model[:2](batch(0, 0)[0]))).sum())
        train(model, optimizer, 2, first=2)
        check_alike(model)

    run_ranks(2, body, timeout=20.0)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_agree_to_leave_out_a_batch(size: int) -> None:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(4):
            optimizer.zero_grad()
            is_bad = float(step == 2 and 1 in ranks)
            if hvd.is_initialized():
                is_bad = float(hvd.allreduce(torch.tensor(is_bad), name="bad", op=hvd.Max))
            if is_bad:
                continue
            torch.autograd.backward(loss_of(model, step, ranks))
            optimizer.step()

    check(loop, size)


# -- what all ranks must decide ------------------------------------------------------------------------


SITUATIONS = ["plain", "step", "passes", "unused", "groups", "sparse", "as dense", "unfrozen", "compressed"]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_epochs_of_which_a_rank_has_no_batch(size: int, situation: str) -> None:
    run_ranks(size, train_over_epochs, situation)


def train_over_epochs(situation: str) -> None:
    """Train over epochs of which some ranks have no batch, the first ones too; each ends with ``join()``."""
    options: dict[str, dict[str, Any]] = {
        "step": {"reduce_at": "step"},
        "passes": {"backward_passes_per_step": 2},
        "unused": {"unused": "zeros"},
        "groups": {"groups": 2},
        "as dense": {"sparse_as_dense": True},
        "compressed": {"compression": hvd.Compression.fp16},
    }
    sparse = situation in ("sparse", "as dense")
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 3, sparse=sparse), torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    ).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options.get(situation, {}))
    for epoch in range(4):
        if situation == "unfrozen":
            model[1].requires_grad_(epoch % 2 == 1)
        for _ in range((0, 2, 0, 1)[(epoch + hvd.rank()) % 4]):
            optimizer.zero_grad()
            for _ in range(2 if situation == "passes" else 1):
                part = model[:2] if situation == "unused" else model
                torch.autograd.backward(part(torch.tensor([1, 2 + hvd.rank()])).sum())
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        check_alike(model)


@pytest.mark.parametrize("size", [3, 4])
def test_an_optimizer_in_a_set_and_then_one_for_all(size: int) -> None:
    def body() -> None:
        pair = hvd.add_process_set([0, 1])
        for process_set in (pair, hvd.global_process_set, pair, hvd.global_process_set):
            if process_set.included():
                model = make_model()
                optimizer = hvd.DistributedOptimizer(
                    sgd(model), model.named_parameters(), process_set=process_set
                )
                train(model, optimizer, 2)
        check_alike(model)

    run_ranks(size, body, knobs={"dynamic_process_sets": True})


def test_an_optimizer_that_lives_through_another_init() -> None:
    """As in an elastic job: some ranks keep their optimizer, and others make it anew."""

    def body() -> None:
        numbers = itertools.count()
        made = []
        for generation in range(3):
            hvd.init()
            if generation == 0 or hvd.rank():
                model = make_model()
                made.append(hvd.DistributedOptimizer(sgd(model), model.named_parameters()))
            hvd.broadcast_parameters(model.state_dict(), 0)
            hvd.broadcast_optimizer_state(made[-1], 0)
            train(model, made[-1], 2, first=next(numbers))
            check_alike(model)
            hvd.shutdown()

    run_ranks(3, body, init=False)


# -- sparse gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unused", ["none", "zeros"])
@pytest.mark.parametrize("kind", ["SparseAdam", "SGD", "as dense"])
@pytest.mark.parametrize("first", ["all", "one rank"])
def test_a_sparse_gradient_that_comes_late_stays_sparse(first: str, kind: str, unused: str) -> None:
    def loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(4):
            optimizer.zero_grad()
            losses = []
            for rank in ranks:
                loss = model[0](torch.tensor([1, 2 + rank])).pow(2).sum()
                if step > 1 and (first == "all" or rank == 0):
                    loss = loss + model[1](torch.tensor([3, 4 + rank])).pow(2).sum()
                losses.append(loss / len(ranks))
            torch.autograd.backward(sum(losses[1:], losses[0]))
            if step > 1:
                assert model[1].weight.grad.is_sparse
                assert len(model[1].weight.grad.coalesce().indices()[0]) <= 3
            optimizer.step()

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Embedding(9, 2, sparse=True) for _ in range(2)]).double()
        with torch.no_grad():
            for number, each in enumerate(model.parameters()):
                each.copy_(torch.arange(18.0).reshape(9, 2) / (9 + number))
        plain = kind == "SGD"
        make_one: Any = torch.optim.SGD if plain else torch.optim.SparseAdam
        return model, make_one(list(model.parameters()), lr=0.1)

    alone, optimizer = make()
    loop(alone, optimizer, range(2))

    def body() -> None:
        model, optimizer = make()
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), unused=unused, sparse_as_dense=kind == "as dense"
        )
        loop(model, optimizer, [hvd.rank()])
        if unused == "none":
            check_weights(model, [each.detach() for each in alone.parameters()])
        check_alike(model)

    run_ranks(2, body, timeout=20.0)
