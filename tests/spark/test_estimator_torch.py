"""pyhvd.spark.Estimator with torch modules, where torch is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd.spark
from tests.spark.test_estimator import ROWS, descend, make, points, rows

torch = pytest.importorskip("torch", reason='pip install "pyhvd[torch]" into .venv-spark to run it')

__all__ = ["make", "rows"]  # fixtures


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
    """Has running means, two inputs, and a parameter that the second half of the ranks does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.last = torch.nn.Linear(2, 1)
        self.now_and_then = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Any, number: Any) -> Any:
        import pyhvd as hvd

        assert number.dtype == torch.int64
        result = self.last(self.norm(x))
        if hvd.is_initialized() and hvd.rank() >= 2:
            return result
        return result * self.now_and_then


def absolute(outputs: Any, labels: Any) -> float:
    assert isinstance(outputs, np.ndarray)
    return float(abs(outputs[:, 0] - labels).mean())


def test_buffers_and_unused_parameters(rows: Any, make: Callable[..., Any], tmp_path: Path) -> None:
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
    assert model.history[-1]["val_absolute"] < 0.2 < model.history[0]["val_absolute"]
    module = model.predictor().module
    x, _ = points()
    held = np.arange(ROWS) % 4 == 0
    assert np.allclose(module.norm.running_mean.numpy(), x[~held].mean(axis=0), atol=0.3)
    assert float(module.now_and_then.detach()) != 1.0
    loaded = pyhvd.spark.Model.load(tmp_path / "runs" / model.run_id / "model")
    assert [row.y__output for row in loaded.transform(rows).orderBy("id").take(3)] == [
        row.y__output for row in model.transform(rows).orderBy("id").take(3)
    ]


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
