"""Training a torch module on the CPU: ranks average each gradient while torch computes the next one.

It is imported only to train a torch module, or to predict with one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

import pyhvd.torch as hvd
from pyhvd.spark.errors import DataError
from pyhvd.spark.ml.training import Batch, Metric, Training, apply_metrics, means_over
from pyhvd.torch import optimizer_state

_DTYPES = (torch.float16, torch.float32, torch.float64)

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Any], torch.Tensor]


class TorchTrainer:
    """A train_fn for a torch module; for its arguments see :class:`pyhvd.spark.Estimator`.

    `loss` returns a tensor of one element; it gets the label columns as one tensor, or as a tuple of several.
    """

    def __init__(
        self, module: torch.nn.Module, loss: Loss, optimizer: MakeOptimizer, metrics: Mapping[str, Metric]
    ) -> None:
        check_module(module)
        self._module = module
        self._loss = loss
        self._make_optimizer = optimizer
        self._metrics = metrics

    def __call__(self, training: Training) -> TorchPredictor:
        """Train on this rank; return the function that predicts."""
        torch.manual_seed(training.seed + hvd.rank())
        own = self._make_optimizer(self._module.parameters())
        self._restore(training, own)
        optimizer = hvd.DistributedOptimizer(own, self._module.named_parameters())
        for epoch in training.epochs():
            self._module.train()
            step = functools.partial(self._step, optimizer)
            measures = means_over(training, training.batches(epoch), step)
            hvd.broadcast_buffers(self._module)  # e.g. the running means of a batch normalisation
            self._module.eval()
            measures |= training.validate(self._measure)
            state = {"module": self._module.state_dict(), "optimizer": optimizer_state.take(optimizer)}
            training.end_epoch(state, measures)
        optimizer.remove()
        return TorchPredictor(self._module)

    def _restore(self, training: Training, optimizer: torch.optim.Optimizer) -> None:
        state = training.state
        if state is None:
            return
        if not isinstance(state, dict) or state.keys() != {"module", "optimizer"}:
            raise DataError(f"the checkpoint of {training.run} is of no torch module: choose another run_id")
        try:
            self._module.load_state_dict(state["module"])
            optimizer_state.put(optimizer, state["optimizer"])
        except (RuntimeError, ValueError) as exc:
            raise DataError(
                f"the checkpoint of {training.run} is of another module or optimizer ({exc}): choose another"
                " run_id"
            ) from exc

    def _step(self, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
        """Update the parameters; return the loss of this rank's rows."""
        optimizer.zero_grad()
        loss = self._loss_of(self._module(*_tensors(self._module, batch.features)), batch)
        torch.autograd.backward(loss)
        optimizer.step()
        return {"loss": float(loss.detach())}

    def _loss_of(self, output: Any, batch: Batch) -> torch.Tensor:
        labels = _tensors(self._module, batch.labels)
        return self._loss(output, labels[0] if len(labels) == 1 else labels)

    def _measure(self, batch: Batch) -> dict[str, float]:
        with torch.no_grad():
            output = self._module(*_tensors(self._module, batch.features))
            loss = float(self._loss_of(output, batch))
        return {"loss": loss} | apply_metrics(self._metrics, _arrays(output), batch.labels)


class TorchPredictor:
    """Predicts with a trained module, from arrays to arrays; switches the module to evaluation mode."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module.eval()

    def __call__(self, features: Any) -> Any:
        """Return the module's output for each row: an array, or a tuple of arrays."""
        with torch.no_grad():
            return _arrays(self.module(*_tensors(self.module, features)))


def check_module(module: torch.nn.Module) -> None:
    """Refuse a module that this trainer cannot train.

    Raises
    ------
    ValueError
        No parameter requires a gradient, or one has another device or dtype; the text names it.
    """
    named = list(module.named_parameters())
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError("the module has no parameter that requires a gradient: there is nothing to train")
    for name, parameter in named:
        if parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}: an Estimator trains torch modules on the CPU;"
                " move it with module.cpu(), or use a train_fn"
            )
        if parameter.dtype not in _DTYPES:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ValueError(f"parameter {name!r} is {parameter.dtype}: an Estimator trains {known}")


def _tensors(module: torch.nn.Module, columns: Any) -> tuple[torch.Tensor, ...]:
    """Return columns as tensors; floats get the module's dtype, as Spark's are float64."""
    dtype = next(module.parameters()).dtype
    given = columns if isinstance(columns, tuple) else (columns,)
    tensors = [torch.from_numpy(np.require(column, requirements=["C", "W"])) for column in given]
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in tensors)


def _arrays(output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return tuple(each.numpy() for each in output)
    return output.numpy()
