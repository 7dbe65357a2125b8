"""DistributedOptimizer, against one process that has all ranks' batches."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import pyhvd.torch as hvd
from pyhvd.testing import run_ranks

SIZE = 2
STEPS = 4


def make_model(seed: int = 0) -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
    return model


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.rand((3, n), generator=generator, dtype=torch.float64) for n in (4, 2))


def loss_of(model: torch.nn.Module, step: int, rank: int) -> Any:
    given, wanted = batch(step, rank)
    return ((model(given) - wanted) ** 2).mean()


def expect(make: Callable[[Any], Any], steps: int = STEPS, passes: int = 1) -> list[torch.Tensor]:
    """Return the weights after the training of one process on all batches."""
    model = make_model()
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        for each in range(step * passes, (step + 1) * passes):
            loss = sum(loss_of(model, each, rank) for rank in range(SIZE)) / SIZE
            torch.autograd.backward(loss)
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def check_weights(model: torch.nn.Module, expected: list[torch.Tensor]) -> None:
    for own, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(own.detach(), wanted, rtol=1e-9, atol=1e-12)


def check_alike(tensors: Iterable[Any]) -> None:
    """Check that the ranks have the same tensors."""
    for tensor in tensors:
        first, second = hvd.allgather(tensor.detach().reshape(1, -1))
        assert torch.equal(first, second)


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, steps: int = STEPS, passes: int = 1, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for each in range(step * passes, (step + 1) * passes):
            torch.autograd.backward(loss_of(model, each, hvd.rank()))
        optimizer.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unnamed": {"named": False},
    "two groups": {"groups": 2},
    "predivided": {"gradient_predivide_factor": 2.0},
    "backward": {"reduce_at": "backward"},
    "none": {"unused": "none"},
    "two passes": {"backward_passes_per_step": 2},
    "two passes at backward": {"backward_passes_per_step": 2, "reduce_at": "backward"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [sgd, adam])
def test_the_weights_are_those_of_one_process(options: str, make: Callable[[Any], Any]) -> None:
    chosen = dict(OPTIONS[options])
    named = chosen.pop("named", True)
    passes = chosen.get("backward_passes_per_step", 1)
    expected = expect(make, passes=passes)

    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            make(model), model.named_parameters() if named else None, **chosen
        )
        train(model, optimizer, passes=passes)
        check_weights(model, expected)

    run_ranks(SIZE, body)


def test_chosen_groups_and_frozen_members() -> None:
    expected = expect(sgd)

    def body() -> None:
        model = make_model()
        parameters = list(model.parameters())
        groups = [[parameters[0], parameters[4]], [parameters[2]]]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=groups)
        train(model, optimizer)
        check_weights(model, expected)

    run_ranks(SIZE, body)


@pytest.mark.parametrize("first", ["scheduler", "optimizer"])
def test_schedulers_and_momentum_in_both_orders(first: str) -> None:
    def body() -> None:
        weights = []
        for distributed in (False, True):
            model = make_model()
            optimizer = sgd(model)
            for step in range(2):  # it has momentum by then
                optimizer.zero_grad()
                torch.autograd.backward(loss_of(model, step, 0))
                optimizer.step()
            if first == "scheduler":
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            if distributed:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            if first == "optimizer":
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(2, 5):
                optimizer.zero_grad()
                for rank in [hvd.rank()] if distributed else range(SIZE):
                    torch.autograd.backward(loss_of(model, step, rank) / (1 if distributed else SIZE))
                optimizer.step()
                schedule.step()
            assert schedule.get_last_lr() == [0.1 / 8]
            weights.append([each.detach() for each in model.parameters()])
        check_weights(model, weights[0])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(SIZE, body)


def test_step_hooks_run_once_with_reduced_gradients() -> None:
    def body() -> None:
        model = make_model()
        optimizer = sgd(model)
        seen: list[str] = []

        def before(*_: Any) -> None:
            seen.append(f"before {next(model.parameters()).grad.sum():.9f}")

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 1)
        mean = hvd.allreduce(next(model.parameters()).grad.sum())
        assert seen == [f"before {mean:.9f}", "after"]

    run_ranks(SIZE, body)


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4 does itself
def test_what_the_result_is() -> None:
    def body() -> None:
        model = make_model()
        given = sgd(model)
        optimizer = hvd.DistributedOptimizer(given, model.named_parameters())
        assert optimizer is given
        assert type(optimizer).__name__ == "SGD"
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
        train(model, optimizer, 1)
        for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(copied) is torch.optim.SGD
            assert copied.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        optimizer.remove()
        assert type(optimizer) is torch.optim.SGD
        train(model, optimizer, 1)

    run_ranks(SIZE, body)


def test_wrapping_again_replaces_the_hooks() -> None:
    expected = expect(sgd, steps=3)

    def body() -> None:
        model = make_model()
        optimizer = sgd(model)
        for step in range(3):
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            train(model, optimizer, 1, first=step)
        check_weights(model, expected)

    run_ranks(SIZE, body)


def test_a_subclass_of_a_distributed_class_works_alone_until_it_is_wrapped() -> None:
    expected = expect(sgd, steps=3)

    def body() -> None:
        model = make_model()
        given: Any = type(hvd.DistributedOptimizer(sgd(model), model.named_parameters()))

        class Counting(given):
            steps = 0

            def step(self, closure: Any = None) -> Any:
                self.steps += 1
                return super().step(closure)

        model, alone = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(
            Counting(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        train(model, optimizer, 3)
        check_weights(model, expected)
        assert optimizer.steps == 3
        unwrapped = Counting(alone.parameters(), lr=0.1, momentum=0.9)
        unwrapped.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        train(alone, unwrapped, 3)
        assert not torch.equal(alone[0].weight, model[0].weight)

    run_ranks(SIZE, body)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "predivide"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"named_parameters": [1, 2]}, "sequence of tuples"),
        ({"named_parameters": [("a", 1), ("a", 2)]}, "Found duplicates: a"),
        ({"named_parameters": []}, "were not named"),
        ({"groups": 0}, "positive number"),
        ({"groups": [[1]]}, "expected parameters"),
        ({"reduce_at": "never"}, "reduce_at"),
        ({"unused": "maybe"}, "unused"),
    ],
)
def test_invalid_arguments_before_init(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(sgd(make_model()), **arguments)


def test_num_groups_is_deprecated() -> None:
    def body() -> None:
        model = make_model()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(DeprecationWarning, match="use groups"):
                hvd.DistributedOptimizer(sgd(model), model.named_parameters(), num_groups=2)

    run_ranks(1, body)


def test_a_parameter_in_two_groups() -> None:
    model = make_model()
    weight = next(model.parameters())
    with pytest.raises(ValueError, match="two groups"):
        hvd.DistributedOptimizer(sgd(model), groups=[[weight], [weight]])


def test_clipping_after_synchronize() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step, hvd.rank()) * 100)
            optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert hvd.allgather(norm.reshape(1)).unique().numel() == 1
            with optimizer.skip_synchronize():
                optimizer.step()
            total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            assert total < 0.11

    run_ranks(SIZE, body)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_gradients_that_autograd_has_recorded() -> None:
    expected = expect(sgd, steps=1)

    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression=hvd.Compression.none
        )
        torch.autograd.backward(loss_of(model, 0, hvd.rank()), create_graph=True)
        optimizer.step()
        check_weights(model, expected)
        optimizer.zero_grad()

    run_ranks(SIZE, body)


def test_a_step_after_synchronize_warns_and_reduces_nothing_again() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Sum)
        torch.autograd.backward(loss_of(model, 0, hvd.rank()))
        optimizer.synchronize()
        before = next(model.parameters()).grad.clone()
        with pytest.warns(UserWarning, match=r"without optimizer.skip_synchronize\(\)"):
            optimizer.step()
        assert torch.equal(before, next(model.parameters()).grad)

    run_ranks(1, lambda: None)
    run_ranks(SIZE, body)


def test_a_gradient_of_a_sum_is_reduced_once() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Sum)
        torch.autograd.backward(loss_of(model, 0, hvd.rank()))
        with pytest.raises(AssertionError, match=r"'4.bias' is reduced already, and op=SUM"):
            torch.autograd.backward(loss_of(model, 1, hvd.rank()))
        optimizer.zero_grad()
        train(model, optimizer, 1)

    run_ranks(SIZE, body)


def test_no_sync_accumulates() -> None:
    expected = expect(sgd, passes=3)

    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for each in (0, 1):
                    torch.autograd.backward(loss_of(model, 3 * step + each, hvd.rank()))
            torch.autograd.backward(loss_of(model, 3 * step + 2, hvd.rank()))
            optimizer.step()
        check_weights(model, expected)

    run_ranks(SIZE, body)


def test_a_window_cut_short_is_reduced_by_step() -> None:
    expected = expect(sgd, passes=1)

    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), backward_passes_per_step=3)
        train(model, optimizer)
        check_weights(model, expected)

    run_ranks(SIZE, body)


class Branches(torch.nn.Module):
    """Ranks may take different branches, and one is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
        for part in self.parts:
            torch.nn.init.ones_(part.weight)
            torch.nn.init.ones_(part.bias)

    def forward(self, given: torch.Tensor, branch: int) -> Any:
        return self.parts[branch](given).sum()


@pytest.mark.parametrize("unused", ["zeros", "none"])
def test_unused_parameters(unused: str) -> None:
    def body() -> None:
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), unused=unused)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(1, 2), hvd.rank()))
            optimizer.step()
            for branch in (0, 1):
                assert torch.equal(model.parts[branch].weight.grad, torch.full((2, 2), 0.5))
            never = model.parts[2].weight
            if unused == "none":
                assert never.grad is None
                assert torch.equal(never, torch.ones(2, 2))
            else:
                assert torch.equal(never.grad, torch.zeros(2, 2))
                assert (never < 1).all()

    run_ranks(SIZE, body)


def test_freezing_and_unfreezing_on_all_ranks() -> None:
    expected = expect(sgd, steps=1)

    def body() -> None:
        model = make_model()
        frozen = model[2].weight
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), model.named_parameters()
        )
        frozen.requires_grad_(False)
        before = frozen.detach().clone()
        train(model, optimizer, 2)
        assert torch.equal(frozen, before)
        frozen.requires_grad_(True)
        train(model, optimizer, 1, first=2)
        mean = hvd.allgather(frozen.grad.reshape(1, -1))
        assert torch.equal(mean[0], mean[1])
        frozen.requires_grad_(False)
        frozen.grad = torch.full_like(frozen, float(hvd.rank()))
        optimizer.zero_grad(set_to_none=False)
        frozen.grad.fill_(hvd.rank())
        torch.autograd.backward(loss_of(model, 4, hvd.rank()))
        optimizer.step()
        assert (frozen.grad == hvd.rank()).all()  # nobody has touched it
        assert len(expected) == 6

    run_ranks(SIZE, body)


def test_frozen_on_one_rank_is_an_error_on_all() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        train(model, optimizer, 2)
        if hvd.rank() == 1:
            model[2].weight.requires_grad_(False)
        with pytest.raises(hvd.MismatchError, match=r"'2.weight': rank 0: [^;]*; rank 1: .*frozen"):
            train(model, optimizer, 1, first=2)

    run_ranks(SIZE, body)


def test_parameters_that_come_later() -> None:
    def body() -> None:
        model = make_model()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters[:2], lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer)
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": parameters[2:]})
        for step in range(2, 5):
            train(model, optimizer, 1, first=step)
            check_alike(parameter.grad for parameter in parameters)

    run_ranks(SIZE, body)


def test_different_models_are_one_error_with_all_differences() -> None:
    def body() -> None:
        rank = hvd.rank()
        model = torch.nn.ModuleDict({"same": torch.nn.Linear(2, 2), "wide": torch.nn.Linear(2, 3 + rank)})
        if rank:
            model["more"] = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), backward_passes_per_step=1 + rank
        )
        with pytest.raises(hvd.MismatchError) as error:
            optimizer.step()
        text = str(error.value)
        assert "backward_passes_per_step: rank 0: 1; rank 1: 2" in text
        size = "torch.float32 [{}, 2] on cpu"
        wide = f"rank 0: {size.format(3)}; rank 1: {size.format(4)}"
        assert f"parameter 'wide.weight': {wide}" in text
        assert "parameter 'more.bias': rank 0: none; rank 1: torch.float32 [1] on cpu" in text
        assert "same" not in text

    run_ranks(SIZE, body)


def test_two_optimizers_of_equal_names_at_a_time() -> None:
    """As in a GAN: the generator's loss puts gradients on the discriminator, which are dropped."""

    def body() -> None:
        first, second = make_model(1), make_model(2)
        one = hvd.DistributedOptimizer(sgd(first), first.named_parameters())
        two = hvd.DistributedOptimizer(adam(second), second.named_parameters())
        for step in range(4):
            one.zero_grad()
            torch.autograd.backward(loss_of(first, step, hvd.rank()) + loss_of(second, step, hvd.rank()))
            one.step()
            two.zero_grad()
            torch.autograd.backward(loss_of(second, step, hvd.rank()))
            two.step()
        for model in (first, second):
            check_alike(model.parameters())

    run_ranks(SIZE, body)


def test_closures_reduce_after_each_call() -> None:
    def lbfgs(model: Any) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def run(model: Any, optimizer: Any, ranks: list[int]) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss: Any = sum(loss_of(model, 0, rank) for rank in ranks) / len(ranks)
            torch.autograd.backward(loss)
            return loss

        for _ in range(3):
            optimizer.step(closure)

    alone = make_model()
    run(alone, lbfgs(alone), list(range(SIZE)))
    expected = [each.detach() for each in alone.parameters()]

    def body() -> None:
        model = make_model()
        run(model, hvd.DistributedOptimizer(lbfgs(model), model.named_parameters()), [hvd.rank()])
        check_weights(model, expected)

    run_ranks(SIZE, body)


def test_a_scaler_needs_no_synchronize_where_backward_reduces() -> None:
    def body() -> None:
        model = make_model().float()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), reduce_at="backward"
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(4):
            optimizer.zero_grad()
            given, wanted = (each.float() for each in batch(step, hvd.rank()))
            loss = ((model(given) - wanted) ** 2).mean()
            if step == 1 and hvd.rank() == 1:
                loss = loss * float("inf")
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            assert hvd.allgather(torch.tensor([scaler.get_scale()])).unique().numel() == 1
        check_alike(model.parameters())
        assert scaler.get_scale() == 8.0

    run_ranks(SIZE, body)


def test_shared_weights_are_reduced_once() -> None:
    def body() -> None:
        layer = torch.nn.Linear(3, 3).double()
        with torch.no_grad():
            layer.weight.fill_(0.1)
            layer.bias.fill_(0.1)
        model = torch.nn.Sequential(layer, layer)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(1, 3).double() * (1 + hvd.rank())).sum())
            optimizer.step()
        both = hvd.allgather(layer.weight.detach().reshape(1, -1))
        assert torch.equal(both[0], both[1])

    run_ranks(SIZE, body)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Flatten()).double()
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        return model

    tokens = [[[0, 1], [1, 2]], [[2, 3], [9, 9]]]

    def step(model: Any, optimizer: Any, ranks: list[int]) -> None:
        optimizer.zero_grad()
        loss: Any = sum((model(torch.tensor(tokens[rank])) ** 2).sum() for rank in ranks)
        torch.autograd.backward(loss / SIZE if len(ranks) > 1 else loss)
        optimizer.step()

    alone = make()
    optimizer = torch.optim.SparseAdam(list(alone.parameters()), lr=0.1)
    for _ in range(3):
        step(alone, optimizer, list(range(SIZE)))
    expected = alone[0].weight.detach()

    def body() -> None:
        model = make()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(model.parameters()), lr=0.1),
            model.named_parameters(),
            sparse_as_dense=as_dense,
        )
        for _ in range(3):
            step(model, optimizer, [hvd.rank()])
            assert model[0].weight.grad.is_sparse
        torch.testing.assert_close(model[0].weight.detach(), expected)

    run_ranks(SIZE, body)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(compression: str) -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression=getattr(hvd.Compression, compression)
        )
        train(model, optimizer)
        for own, wanted in zip(model.parameters(), expect(sgd), strict=True):
            torch.testing.assert_close(own.detach(), wanted, rtol=0.05, atol=0.01)
            assert own.grad is not None
            assert own.grad.dtype is torch.float64

    run_ranks(SIZE, body)


def test_adasum_combines_steps() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Adasum)
        before = [each.detach().clone() for each in model.parameters()]
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, 0, 0))  # equal steps: their combination is that step
        optimizer.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), old - 0.1 * parameter.grad)

    run_ranks(SIZE, body)


@pytest.mark.parametrize("passes", [2, 4])
def test_adasum_combines_steps_of_several_backward_passes(passes: int) -> None:
    """As in Horovod's ImageNet example: zero_grad(), a backward pass for each part of a batch, step()."""

    def body() -> None:
        model, alone = make_model(), make_model()
        options: dict[str, Any] = {"op": hvd.Adasum, "backward_passes_per_step": passes}
        own_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(own_optimizer, model.named_parameters(), **options)
        for step in range(3):
            optimizer.zero_grad()
            alone.zero_grad()
            for part in range(passes):
                for each in (model, alone):
                    torch.autograd.backward(loss_of(each, step * passes + part, hvd.rank()) / passes)
            optimizer.step()
            with torch.no_grad():
                steps = [-0.1 * each.grad for each in alone.parameters() if each.grad is not None]
                for own, change in zip(
                    alone.parameters(), hvd.grouped_allreduce(steps, op=hvd.Adasum), strict=True
                ):
                    own.add_(change)
            for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(own.detach(), wanted.detach())

    run_ranks(SIZE, body)


def test_adasum_refuses_what_it_cannot_do() -> None:
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.DistributedOptimizer(sgd(make_model()), op=hvd.Adasum, sparse_as_dense=True)


def test_a_process_set_and_the_rank_outside() -> None:
    def body() -> None:
        pair = hvd.add_process_set([0, 2])
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=pair)
        train(model, optimizer, 3)
        weights = hvd.allgather(next(model.parameters()).detach().reshape(1, -1))
        assert torch.equal(weights[0], weights[2])
        assert not torch.equal(weights[0], weights[1])

    run_ranks(3, body, knobs={"dynamic_process_sets": True})


def test_one_rank_and_gradients_that_are_replaced() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = None if step % 2 else torch.zeros_like(parameter)
            torch.autograd.backward(loss_of(model, step, hvd.rank()))
            optimizer.step()

    run_ranks(1, body)
    run_ranks(SIZE, body)


def test_a_dropped_optimizer_leaves_the_model_alone() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        train(model, optimizer, 1)
        del optimizer
        for step in range(3):
            torch.autograd.backward(loss_of(model, step, hvd.rank()))

    run_ranks(SIZE, body)


@pytest.mark.parametrize("situation", ["plain", "first", "unused", "unfrozen", "sparse", "adasum", "closure"])
def test_uneven_batches_end_with_join(situation: str) -> None:
    def body() -> None:
        sparse = situation == "sparse"
        model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=sparse), torch.nn.Linear(3, 1)).double()
        hvd.broadcast_parameters(model.state_dict(), 0)
        if situation == "unfrozen":
            model[1].requires_grad_(False)
        options: dict[str, Any] = {"adasum": {"op": hvd.Adasum}, "unused": {"unused": "none", "groups": 2}}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), **options.get(situation, {})
        )

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.tensor([1, 2 + hvd.rank()])).sum()
            torch.autograd.backward(loss)
            return loss

        for step in range((0 if situation == "first" else 2) + 3 * hvd.rank()):
            if step == 3:
                model[1].requires_grad_(True)
            if situation == "closure":
                optimizer.step(closure)
                continue
            before = model[1].bias.detach().clone()
            closure()
            optimizer.step()
            if model[1].bias.requires_grad and situation != "adasum":
                # The Average is over all ranks; those that have joined have a gradient of zero.
                alone = situation == "first" or step > 1
                torch.testing.assert_close(
                    before - model[1].bias, torch.full((1,), 0.1 * (2 - alone)).double()
                )
        last = hvd.join()
        assert last == 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        check_alike(model.parameters())

    run_ranks(2, body)


def test_parameters_that_cannot_be_reduced_are_refused() -> None:
    def body() -> None:
        lazy = torch.nn.LazyLinear(2)
        with pytest.raises(TypeError, match=r"parameter 'weight': .* pass one batch through the model first"):
            hvd.DistributedOptimizer(torch.optim.SGD(lazy.parameters()), lazy.named_parameters())
        with pytest.raises(TypeError, match=r"broadcast_parameters.*'weight'.*one batch"):
            hvd.broadcast_parameters({"weight": lazy.weight})
        plain = torch.nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters()), plain.named_parameters())
        with pytest.raises(
            TypeError, match=r"allreduce\.noname\.1\.0'.*meta: make it on a device with memory"
        ):
            optimizer.add_param_group({"params": torch.nn.Parameter(torch.empty(2, device="meta"))})
        plain.weight._is_flat_param = True
        with pytest.raises(TypeError, match="use the optimizer as it is"):
            hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters()), plain.named_parameters())

    run_ranks(1, body)


def test_a_model_that_changes() -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        train(model, optimizer, 2)
        model.float()
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.rand(3, 4)).sum())
            optimizer.step()
        assert model[0].weight.dtype is torch.float32
        check_alike(model.parameters())
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.rand(3, 4)).sum())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match=r"no parameter .* has a gradient.*assign=True.*anew"):
                optimizer.step()
        optimizer.step()

    run_ranks(2, body)
