"""TorchState: models and optimizers stay the same objects, and go on from the commit."""

from __future__ import annotations

import copy
import importlib
import threading
from typing import Any

import numpy as np
import pytest
import torch

import pyhvd.torch as hvd
from pyhvd.elastic import pickles
from pyhvd.testing import run_ranks
from pyhvd.torch.elastic import ElasticSampler, ObjectState, TorchState
from tests.elastic_hosts import Hosts
from tests.mpi.launch import ROOT

STRIDED = torch.arange(24.0).reshape(2, 3, 2, 2)
TENSORS = {
    "plain": torch.arange(6).reshape(2, 3),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "gaps": torch.arange(12).reshape(3, 4)[:, ::2],
    "channels_last": STRIDED.to(memory_format=torch.channels_last),
    "0-d": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.arange(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "leaf": torch.ones(2, requires_grad=True),
    "expanded": torch.ones(1, 2).expand(3, 2),
    "sparse": torch.tensor([[0, 1], [2, 0]]).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "fixed": torch.nn.Parameter(torch.ones(2), requires_grad=False),
}


def back(state: Any) -> Any:
    return pickles.load(*pickles.dump(state))


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str) -> None:
    tensor = TENSORS[name]
    found = back([tensor])[0]
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
    )
    if name == "sparse":
        found, tensor = found.to_dense(), tensor.to_dense()
    assert torch.equal(found, tensor)
    if name in ("plain", "transposed", "channels_last"):
        assert found.stride() == tensor.stride()


def test_a_tensor_in_a_graph_comes_back_without_it() -> None:
    (found,) = back([torch.ones(2, requires_grad=True) * 2])
    assert found.tolist() == [2, 2]
    assert not found.requires_grad


def test_tensors_that_share_memory_share_it_again() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    state = back([parameter, parameter.data, parameter.detach().numpy(), parameter])
    state[2][0] = 5.0
    assert [float(each[0].detach() if isinstance(each, torch.Tensor) else each[0]) for each in state] == [
        5.0
    ] * 4
    assert state[0] is state[3]
    assert parameter[0] == 0


def test_contiguous_tensors_are_not_copied_by_dump() -> None:
    (found,), _ = pickles.dump(STRIDED)
    assert np.shares_memory(found, STRIDED.numpy())


def test_a_tensor_with_attributes_keeps_them() -> None:
    tensor = torch.nn.Parameter(torch.ones(2))
    tensor.split = "rows"
    found = back(tensor)
    assert found.split == "rows"
    assert isinstance(found, torch.nn.Parameter)


# The ranks are threads, which share torch's generator.
SEEDED = threading.Lock()


class Training:
    """One rank's objects of a program, which differ on each rank before they are synchronised."""

    def __init__(self) -> None:
        with SEEDED:
            torch.manual_seed(hvd.rank())
            layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.model = torch.nn.Sequential(*layers)
        inner = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(inner, self.model.named_parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
        self.sampler = ElasticSampler(range(40))
        self.state = TorchState(
            self.model, self.optimizer, scheduler=self.scheduler, sampler=self.sampler, batch=0, names=["a"]
        )

    def step(self, state: Any) -> None:
        self.optimizer.zero_grad()
        given = torch.full((4, 3), float(state.batch)) + torch.arange(12.0).reshape(4, 3)
        self.model(given).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        state.sampler.record_batch(state.batch, 4)
        state.batch += 1

    def found(self) -> Any:
        weights = [each.tolist() for each in self.model.state_dict().values()]
        moments = [each["exp_avg"].tolist() for each in self.optimizer.state_dict()["state"].values()]
        counts = self.state.batch, self.state.names, self.sampler.state_dict()
        return weights, moments, self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch, *counts


def train(steps: int) -> Any:
    training = Training()
    kept = training.model, training.optimizer, training.scheduler, training.sampler

    @hvd.elastic.run
    def function(state: Any) -> None:
        for _ in range(steps):
            training.step(state)
            state.commit()

    function(training.state)
    state: Any = training.state
    assert all(
        a is b
        for a, b in zip(kept, (state.model, state.optimizer, state.scheduler, state.sampler), strict=True)
    )
    return training.found()


def test_training_in_parts_gives_the_same_bits() -> None:
    whole = Hosts().run([0, 0], train, 6)
    assert whole[0] == whole[1]
    hosts = Hosts()
    hosts.run([0, 0], train, 2)
    hosts.run([0, 1], train, 3)
    assert hosts.run([1, 2], train, 1) == whole


def test_a_job_that_is_not_elastic_trains_alike() -> None:
    assert run_ranks(2, train, 6) == Hosts().run([0, 0], train, 6)


def test_restore_brings_modules_and_optimizers_back() -> None:
    def body() -> None:
        training = Training()
        state: Any = training.state
        training.step(state)
        state.commit()
        before = copy.deepcopy(training.found())
        training.step(state)
        state.names.append("b")
        assert training.found() != before
        state.restore()
        assert training.found() == before

    run_ranks(1, body)


def test_restore_before_a_commit_brings_back_what_the_state_was_made_of() -> None:
    def body() -> None:
        training = Training()
        model = copy.deepcopy(training.model.state_dict())
        training.step(training.state)
        training.state.restore()
        assert all(torch.equal(each, model[name]) for name, each in training.model.state_dict().items())
        assert not training.optimizer.state_dict()["state"]
        assert training.found()[-3:] == (0, ["a"], {"epoch": 0, "processed_num": 0})
        hvd.elastic.run(again)(training.state, training)

    def again(state: Any, training: Training) -> None:
        before = copy.deepcopy(training.found())
        training.step(state)
        assert training.found() != before
        state.restore()
        assert training.found() == before

    run_ranks(2, body)


def test_several_models_and_an_assignment() -> None:
    hosts = Hosts()

    def body(scale: float) -> Any:
        first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        state: Any = TorchState(generator=first, critic=second, optimizer=None)
        replaced = torch.nn.Linear(1, 1)
        state.critic = replaced

        @hvd.elastic.run
        def function(state: Any) -> Any:
            if scale:
                torch.nn.init.constant_(state.generator.weight, scale)
                torch.nn.init.constant_(state.critic.weight, -scale)
                state.commit()
            assert state.model is None
            return first.weight.item(), replaced.weight.item()

        return function(state)

    hosts.run([0, 0], body, 2.0)
    assert hosts.run([0, 1, 1], body, 0.0) == [(2.0, -2.0)] * 3


def test_rates_of_callbacks_stay_and_are_rank_0s() -> None:
    hosts = Hosts()

    def body() -> Any:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        tensors = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False, capturable=False)
        state = TorchState(model, optimizer, other=tensors)

        def scale() -> None:
            optimizer.param_groups[0]["lr"] = hvd.size() + hvd.rank()
            tensors.param_groups[0]["lr"].fill_(float(hvd.rank() + 7))

        state.register_reset_callbacks([scale])
        hvd.elastic.run(lambda state: state.commit())(state)
        own, other = optimizer.param_groups[0], tensors.param_groups[0]["lr"]
        assert len(own["params"]) == 2
        return own["lr"], own["momentum"], float(other)

    assert hosts.run([0, 0], body) == [(0.1, 0.5, 0.5)] * 2
    assert hosts.run([0, 0, 0], body) == [(3, 0.5, 7.0)] * 3


def test_a_model_of_another_shape_is_named() -> None:
    hosts = Hosts()

    def body(size: int) -> None:
        hvd.elastic.run(lambda state: state.commit())(TorchState(torch.nn.Linear(1, size)))

    hosts.run([0], body, 1)
    with pytest.raises(
        AssertionError, match=r"(?s)state.model does not fit what was committed: RuntimeError: .*weight"
    ):
        hosts.run([0], body, 2)


def test_the_sampler_feeds_a_data_loader() -> None:
    def body() -> Any:
        dataset = torch.utils.data.TensorDataset(torch.arange(10))
        sampler = ElasticSampler(dataset, shuffle=False)
        assert isinstance(sampler, torch.utils.data.Sampler)
        loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)
        return [batch.tolist() for (batch,) in loader], len(loader)

    assert run_ranks(2, body) == [([[0, 2], [4, 6], [8]], 3), ([[1, 3], [5, 7], [9]], 3)]


def averaged(steps: int, others: bool = False) -> Any:
    """Train bfloat16 weights, whose averages and products are float32; return the bits of all."""
    model = torch.nn.Linear(2, 2).bfloat16()
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.NAdam(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    state: Any = (ObjectState if others else TorchState)(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def function(state: Any) -> Any:
        for _ in range(steps):
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, 1.0 + state.step % 3)
            optimizer.step()
            optimizer.state[model.weight].setdefault("master", torch.rand(2, 2, dtype=torch.float64))
            state.step += 1
            state.commit()
        found = optimizer.state[model.weight]
        return {name: (str(each.dtype), each.tolist()) for name, each in found.items()}, model.weight.tolist()

    return function(state)


@pytest.mark.parametrize("others", [False, True], ids=["TorchState", "ObjectState"])
def test_state_of_another_dtype_than_its_weight_goes_on(others: bool) -> None:
    hosts, whole = Hosts(), Hosts()
    hosts.run([0, 0], averaged, 3, others)
    first, second = hosts.run([0, 1], averaged, 30, others)
    assert first == second
    dtypes = {name: dtype for name, (dtype, _) in first[0].items()}
    assert dtypes["mu_product"] == "torch.float32"
    assert dtypes["master"] == "torch.float64"
    (expected, weights), _ = whole.run([0, 0], averaged, 33, others)
    del first[0]["master"], expected["master"]  # which is random
    assert first == (expected, weights)


def test_synchronised_and_restored_tensors_stay_the_same_objects() -> None:
    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(3).bfloat16())
        optimizer = torch.optim.NAdam([weight], lr=torch.tensor(0.01), foreach=False)
        weight.grad = torch.full_like(weight, 1.0 + hvd.rank())
        optimizer.step()
        before = dict(optimizer.state[weight]), optimizer.param_groups[0]["lr"]
        state = TorchState(optimizer=optimizer)

        def check() -> list[float]:
            now, rate = optimizer.state[weight], optimizer.param_groups[0]["lr"]
            assert rate is before[1]
            assert all(now[name] is each for name, each in before[0].items())
            return [*now["exp_avg"].tolist(), now["mu_product"].item(), rate.item()]

        state.sync()
        first, second = hvd.allgather_object(check())
        assert first == second
        state.save()
        optimizer.step()
        before[1].fill_(0.5)
        assert check() != first
        state.restore()
        assert check() == first

    run_ranks(2, body)


def test_a_model_gets_the_dtype_that_was_saved() -> None:
    """All ranks have rank 0's dtypes after sync(), and those of the commit after a restart."""
    hosts = Hosts()

    def body(half: bool) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        if half:
            model.bfloat16()
        weight, mean = model[0].weight, model[1].running_mean
        hvd.elastic.run(lambda state: state.commit())(TorchState(model))
        assert model[0].weight is weight
        assert model[1].running_mean is mean
        return str(weight.dtype), str(mean.dtype), weight.tolist()

    first, *others = hosts.run([0, 0], lambda: body(hvd.rank() == 0))
    assert first[:2] == ("torch.bfloat16",) * 2
    assert hosts.run([0, 1], body, False) == [first] * 2
    assert others == [first]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("torch.elastic", "run ObjectState State TorchState ElasticSampler sampler state"),
        ("torch.elastic.state", "TorchState"),
        ("torch.elastic.sampler", "ElasticSampler"),
        ("elastic", "run ObjectState State ElasticSampler sampler state"),
        ("elastic.state", "ObjectState State"),
        ("elastic.sampler", "ElasticSampler"),
        ("common.elastic", "ObjectState State"),
    ],
)
def test_horovods_names(module: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "compat" / "horovod"))
    found = importlib.import_module(f"horovod.{module}")
    assert not [each for each in names.split() if not hasattr(found, each)]
    top = importlib.import_module("horovod.torch")
    assert top.elastic is importlib.import_module("horovod.torch.elastic")
    assert top.elastic.TorchState is TorchState
    assert top.elastic.ObjectState is ObjectState
