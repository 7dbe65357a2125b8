"""pyhvd.spark.Estimator with torch modules, where torch is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest

import pyhvd as hvd
import pyhvd.spark
from pyhvd.testing import run_ranks
from tests.spark.test_estimator import ROWS, descend, make, points, rows

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="make test-spark-torch installs it")

__all__ = ["make", "rows"]  # fixtures

# Four ranks import torch for every fit, and the first test starts the cluster.
pytestmark = pytest.mark.timeout(280)


def mean_square(output: Any, labels: Any) -> Any:
    return ((output[:, 0] - labels) ** 2).mean()


def linear() -> Any:
    module = torch.nn.Linear(2, 1, dtype=torch.float64)
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    return module


def test_a_module_trains_as_one_process_does(rows: Any, make: Callable[..., Any]) -> None:
    chosen = {
        "model": linear(),
        "loss": mean_square,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        "run_id": "torch",
    }
    make(epochs=2, **chosen).fit(rows)
    model = make(epochs=5, **chosen).fit(rows)  # goes on, with the optimizer's momentum
    expected = descend(*points(), 5, 0.1, 0.5)
    module = model.predictor().module
    assert np.allclose(module.weight.detach().numpy()[0], expected.parameters["weights"], rtol=1e-10)
    assert np.allclose(module.bias.detach().numpy(), expected.parameters["bias"], rtol=1e-10)
    out = {row.id: row.y__output for row in model.transform(rows).collect()}
    assert np.allclose([out[i] for i in range(ROWS)], expected.predict(points()[0])[:, None], rtol=1e-10)


class Normalised(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A module with running means and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.last = torch.nn.Linear(2, 1)

    def forward(self, x: Any, number: Any) -> Any:
        assert number.dtype == torch.int64
        return self.last(self.norm(x))


def absolute(outputs: Any, labels: Any) -> float:
    assert isinstance(outputs, np.ndarray)
    return float(abs(outputs[:, 0] - labels).mean())


class Epochs:
    """A training of one batch, without Spark, which goes on from its own checkpoint."""

    seed, run = 0, "torch"

    def __init__(self) -> None:
        self.state: Any = None

    def epochs(self) -> list[int]:
        return [0, 1, 2]

    def batches(self, epoch: int) -> list[Any]:
        ones = np.ones((4, 2))
        return [SimpleNamespace(features=ones, labels=ones[:, 0] * epoch, rows=4)]

    def averages(self, sums: dict[str, float], rows: int) -> dict[str, float]:
        return {name: value / rows for name, value in sums.items()}

    def validate(self, _: Any) -> dict[str, float]:
        return {}

    def end_epoch(self, state: Any, _: Any) -> None:
        self.state = cloudpickle.loads(cloudpickle.dumps(state))


def test_a_checkpoint_keeps_the_dtypes_of_the_optimizers_state() -> None:
    """The averages of float16 weights stay float32, so two fits give the bits of one."""
    from pyhvd.spark.ml.torch_trainer import TorchTrainer

    def fit(epochs: Any) -> Any:
        module = linear().half()
        torch.nn.init.constant_(module.weight, 1.0)
        trainer = TorchTrainer(module, mean_square, partial(torch.optim.NAdam, lr=0.01), {})
        trainer(epochs)
        return epochs.state

    def body() -> None:
        epochs = Epochs()
        fit(epochs)
        before = epochs.state["optimizer"]["state"][0]["mu_product"]
        assert before.dtype is torch.float32
        epochs.epochs = lambda: [0]  # type: ignore[method-assign]
        after = fit(epochs)["optimizer"]["state"][0]["mu_product"]
        assert after.dtype is torch.float32
        whole = Epochs()
        whole.epochs = lambda: [0, 1, 2, 0]  # type: ignore[method-assign]
        expected = fit(whole)
        assert torch.equal(after, expected["optimizer"]["state"][0]["mu_product"])
        assert torch.equal(epochs.state["module"]["weight"], expected["module"]["weight"])
        plain = Epochs()  # a checkpoint of an earlier version
        plain.state = {"module": epochs.state["module"], "optimizer": epochs.state["optimizer"]["state_dict"]}
        fit(plain)

    run_ranks(1, body)


def test_buffers_metrics_and_a_saved_module(rows: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    model = make(
        model=Normalised(),
        loss=mean_square,
        optimizer=partial(torch.optim.Adam, lr=0.05),
        feature_cols=["x", "id"],
        epochs=20,
        batch_size=8,
        validation="held",
        metrics={"absolute": absolute},
    ).fit(rows)
    assert model.history[-1]["val_absolute"] < model.history[0]["val_absolute"] / 3
    module = model.predictor().module
    x, _ = points()
    held = np.arange(ROWS) % 4 == 0
    assert np.allclose(module.norm.running_mean.numpy(), x[~held].mean(axis=0), atol=0.3)
    loaded = pyhvd.spark.Model.load(tmp_path / "runs" / model.run_id / "model")
    assert [row.y__output for row in loaded.transform(rows).orderBy("id").take(3)] == [
        row.y__output for row in model.transform(rows).orderBy("id").take(3)
    ]


class Partly(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A module whose output is the sum of its parameters; ranks 2 and 3 do not use the second."""

    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Parameter(torch.zeros(()))
        self.now_and_then = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: Any) -> Any:
        used = hvd.is_initialized() and hvd.rank() < 2
        return (self.always + self.now_and_then if used else self.always).expand(len(x))


def mean_output(output: Any, labels: Any) -> Any:
    return output.mean()


def test_a_parameter_that_some_ranks_do_not_use(rows: Any, make: Callable[..., Any]) -> None:
    model = make(model=Partly(), loss=mean_output, optimizer=partial(torch.optim.SGD, lr=1.0)).fit(rows)
    module = model.predictor().module
    assert float(module.always.detach()) == -1.0  # all gradients are 1
    assert float(module.now_and_then.detach()) == -0.5  # two are 1, two count as 0


def test_modules_that_cannot_be_trained(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"a torch module needs loss, e.g."):
        make(model=linear(), optimizer=None)
    chosen = {"loss": mean_square, "optimizer": torch.optim.Adam}
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        make(model=torch.nn.ReLU(), **chosen)
    with pytest.raises(ValueError, match=r"parameter 'weight' is torch\.bfloat16"):
        make(model=torch.nn.Linear(2, 1, dtype=torch.bfloat16), **chosen)
    with pytest.raises(ValueError, match="parameter 'weight' is on meta"):
        make(model=torch.nn.Linear(2, 1, device="meta"), **chosen)
