"""Batch normalisation over the batches of all ranks.

Forward and backward each add up one vector over the ranks: sum, sum of squares and count, then the two sums
of the gradient. Each rank finds its mean and variance in float32 at least; the sums are float64.

Source: S. Ioffe and C. Szegedy, "Batch Normalization", 2015, https://arxiv.org/abs/1502.03167.
"""

from __future__ import annotations

from typing import Any

import torch

from pyhvd.api import collectives
from pyhvd.api.collectives import Sum
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.engine.context import KeptName

_CACHED_BYTES = 2 << 20  # of a core's second cache


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation whose statistics are those of all ranks' batches.

    It takes tensors of any number of dimensions, on any device, with the channels in dimension 1. Batches may
    differ in size, and may be empty. Outputs, running statistics and gradients of the input are those of
    ``torch.nn.BatchNorm`` on the concatenated batches; the gradients of weight and bias are this rank's part,
    as those of other layers are. Every rank must call the same layers in the same order of calls per layer.
    In each process set, all members must first use its layers in the same order: at the start, after
    ``init()``, and after a :func:`pyhvd.join`.

    Parameters
    ----------
    num_features, eps, momentum, affine, track_running_stats
        As in ``torch.nn.BatchNorm2d``.
    process_set : ProcessSet
        The ranks whose batches are taken together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's
        track_running_stats: bool = True,  # noqa: FBT001, FBT002 - torch's
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set
        self._name = KeptName("batch norm")

    @classmethod
    def convert(cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> Any:
        """Return a module whose ``BatchNorm`` layers, at any depth, are replaced; weights are shared."""
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            return cls._from(module, process_set)
        for name, child in module.named_children():
            replaced = cls.convert(child, process_set)
            if replaced is not child:
                module.add_module(name, replaced)
        return module

    @classmethod
    def _from(cls, norm: Any, process_set: ProcessSet) -> SyncBatchNorm:
        options = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made = cls(*options, process_set)
        made._parameters, made._buffers = norm._parameters, norm._buffers
        made.training = norm.training
        return made

    def forward(self, input: Any) -> Any:
        """Return the normalised batch."""
        self._check_input_dim(input)
        own_statistics = self.training or (self.running_mean is None and self.running_var is None)
        if not own_statistics or (self.process_set.size() or 1) == 1:
            return super().forward(input)
        name = self._name.in_set(self.process_set)
        out, mean, var, count = _Normalised.apply(
            input, self.weight, self.bias, self.eps, name, self.process_set
        )
        if self.training and self.track_running_stats:
            self._follow(mean, var, count)
        return out

    def _check_input_dim(self, input: Any) -> None:
        """Refuse a batch of another shape; torch's own forward() calls this too."""
        if input.dim() < 2:
            raise ValueError(f"expected a batch of at least 2 dimensions, not {input.dim()}")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, not {input.size(1)}")

    def _follow(self, mean: Any, var: Any, count: float) -> None:
        """Let the running statistics follow those of a batch of ``count`` values per channel."""
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        if not count:
            return
        unbiased = var * (count / max(count - 1.0, 1.0))
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalised(torch.autograd.Function):
    """The normalised batch, with mean, variance and count of all ranks' values per channel."""

    @staticmethod
    def forward(
        ctx: Any, batch: Any, weight: Any, bias: Any, eps: float, name: str, process_set: ProcessSet
    ) -> Any:
        channels = batch.size(1)
        dtype = torch.promote_types(batch.dtype, torch.float32)
        wide = batch.to(dtype)
        n = batch.numel() // channels
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=batch.device)
        if n:
            own_mean, own_var = map(torch.Tensor.double, torch.batch_norm_update_stats(wide, None, None, 0.0))
            sums[:channels], sums[channels:-1], sums[-1] = n * own_mean, n * (own_var + own_mean**2), n
        collectives.allreduce_(sums, name=name, op=Sum, process_set=process_set)
        count = float(sums[-1])
        total = sums / max(count, 1.0)
        mean, var = total[:channels], total[channels:-1] - total[:channels] ** 2
        mean, var = mean.to(dtype), var.clamp_(min=0.0).to(dtype)
        ctx.save_for_backward(batch, weight, mean, torch.rsqrt(var + eps))
        ctx.terms = count, name, process_set
        ctx.mark_non_differentiable(mean, var)
        affine = (None, None) if weight is None else (weight.to(dtype), bias.to(dtype))
        out = torch.nn.functional.batch_norm(wide, mean, var, *affine, False, 0.0, eps).to(batch.dtype)
        return out, mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        batch, weight, mean, scale = ctx.saved_tensors
        count, name, process_set = ctx.terms
        channels, dtype = batch.size(1), mean.dtype
        wide, inputs = gradient.to(dtype), batch.to(dtype)
        sums = torch.zeros(2 * channels, dtype=dtype, device=batch.device)
        if batch.numel():
            wanted = (False, True, True)
            _, sums[channels:], sums[:channels] = torch.ops.aten.native_batch_norm_backward(
                wide, inputs, None, None, None, mean, scale, True, 0.0, wanted
            )
        of_bias, of_weight = sums[:channels].clone(), sums[channels:].clone()
        collectives.allreduce_(sums, name=f"{name}.grad", op=Sum, process_set=process_set)
        sums /= max(count, 1.0)
        # factor * (gradient - its mean - z * mean of gradient * z), where z = (inputs - mean) * scale
        factor = scale if weight is None else scale * weight.to(dtype)
        needs = ctx.needs_input_grad
        of_batch = torch.empty_like(inputs)
        if needs[0] and batch.numel():
            slope, shift = -factor * scale * sums[channels:], -factor * sums[:channels]
            _combine(inputs, mean, slope, shift, wide, factor, of_batch)
        return (
            of_batch.to(batch.dtype) if needs[0] else None,
            of_weight.to(weight.dtype) if needs[1] else None,
            of_bias.to(weight.dtype) if needs[2] else None,
            None,
            None,
            None,
        )


def _combine(inputs: Any, mean: Any, slope: Any, shift: Any, gradient: Any, factor: Any, out: Any) -> None:
    """Write (inputs - mean) * slope + shift + gradient * factor; all vectors have one value per channel.

    It takes a few samples at a time, so that the second term is added while the first one is in the cache.
    """
    ones, unused = torch.ones_like(mean), mean.new_empty(0)
    factor = factor.reshape(-1, *[1] * (inputs.dim() - 2))
    size = inputs.numel() * inputs.element_size() // len(inputs)
    samples = len(inputs) if inputs.is_cuda else max(1, _CACHED_BYTES * torch.get_num_threads() // size)
    for each, given, part in zip(
        inputs.split(samples), gradient.split(samples), out.split(samples), strict=True
    ):
        # As a batch norm that only evaluates: torch multiplies and adds vectors of channels slower otherwise.
        torch.ops.aten.native_batch_norm.out(
            each, slope, shift, mean, ones, False, 0.0, 0.0, out=part, save_mean=unused, save_invstd=unused
        )
        part.addcmul_(given, factor)


convert_sync_batchnorm = SyncBatchNorm.convert
"""See :meth:`SyncBatchNorm.convert`."""
