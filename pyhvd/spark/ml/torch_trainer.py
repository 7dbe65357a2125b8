"""Training a torch module on the CPU: ranks average each gradient while torch computes the next one.

It is imported only to train a torch module, or to predict with one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

import pyhvd as hvd
from pyhvd.spark.errors import DataError
from pyhvd.spark.ml.training import Batch, Metric, Training, apply_metrics, means_over

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
        optimizer = self._make_optimizer(self._module.parameters())
        self._restore(training, optimizer)
        with _GradientAverages(self._module) as averages:
            for epoch in training.epochs():
                self._module.train()
                step = functools.partial(self._step, optimizer, averages)
                measures = means_over(training, training.batches(epoch), step)
                self._share_buffers()
                self._module.eval()
                measures |= training.validate(self._measure)
                state = {"module": self._module.state_dict(), "optimizer": optimizer.state_dict()}
                training.end_epoch(state, measures)
        return TorchPredictor(self._module)

    def _restore(self, training: Training, optimizer: torch.optim.Optimizer) -> None:
        state = training.state
        if state is None:
            return
        if not isinstance(state, dict) or state.keys() != {"module", "optimizer"}:
            raise DataError(f"the checkpoint of {training.run} is of no torch module: choose another run_id")
        try:
            self._module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as exc:
            raise DataError(
                f"the checkpoint of {training.run} is of another module or optimizer ({exc}): choose another"
                " run_id"
            ) from exc

    def _step(
        self, optimizer: torch.optim.Optimizer, averages: _GradientAverages, batch: Batch
    ) -> dict[str, float]:
        """Update the parameters; return the loss of this rank's rows."""
        optimizer.zero_grad()
        loss = self._loss_of(self._module(*_tensors(self._module, batch.features)), batch)
        torch.autograd.backward(loss)
        averages.wait()
        optimizer.step()
        return {"loss": float(loss.detach())}

    def _loss_of(self, output: Any, batch: Batch) -> torch.Tensor:
        labels = _tensors(self._module, batch.labels)
        return self._loss(output, labels[0] if len(labels) == 1 else labels)

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers, e.g. the running means of a batch normalisation, to every rank."""
        handles = [
            hvd.broadcast_async_(buffer.numpy(), 0, name=f"buffer.{name}")
            for name, buffer in self._module.named_buffers()
        ]
        for handle in handles:
            handle.result()

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


class _GradientAverages:
    """Averages each gradient over the ranks as soon as backward has computed it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = {
            name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        self._handles: dict[str, hvd.Handle] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> _GradientAverages:
        for name, parameter in self._parameters.items():
            self._hooks.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda ready, name=name: self._start(name, ready)
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def wait(self) -> None:
        """Wait until every gradient is the ranks' average; unused parameters contribute zeros."""
        for name, parameter in self._parameters.items():
            if name not in self._handles:
                parameter.grad = torch.zeros_like(parameter)
                self._start(name, parameter)
        for handle in self._handles.values():
            handle.result()
        self._handles.clear()

    def _start(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._handles[name] = hvd.allreduce_async_(
            parameter.grad.numpy(), name=f"gradient.{name}", op=hvd.Average
        )


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
