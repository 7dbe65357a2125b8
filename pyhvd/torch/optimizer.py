"""DistributedOptimizer: an optimizer that steps with the gradients of all ranks.

The given optimizer itself gets a class that derives from its own. So its state, its schedulers and whatever
else refers to it stay valid, in any order of construction.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from pyhvd.api import collectives
from pyhvd.api.collectives import Adasum, Average
from pyhvd.api.compression import Compressor
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.devices.torch_host_arrays import why_not
from pyhvd.dtypes import ReduceOp
from pyhvd.torch.compression import Compression
from pyhvd.torch.position import Position
from pyhvd.torch.reducer import Reducer, Terms


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    process_set: ProcessSet = global_process_set,
    *,
    reduce_at: str = "backward",
    unused: str = "none",
) -> Any:
    """Make an optimizer step with the gradients of all ranks, and return it.

    Gradients are reduced while others are computed; the backward pass ends when all are (docs/torch.md).

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        It keeps its state. Its class is replaced by one of the same name that derives from it.
    named_parameters : iterable of (str, torch.Tensor), optional
        ``model.named_parameters()``: the names in errors and reports.
    compression : Compressor
        What is sent in place of a gradient.
    backward_passes_per_step : int
        Gradients are summed, not averaged, over so many backward passes before they are reduced.
    op : ReduceOp
        With Adasum each rank steps by itself, and the ranks combine their changes of the weights.
    gradient_predivide_factor : float
        With Average: divide gradients by it before the sum, and multiply by it after.
    num_groups, groups : int, or sequence of sequences of torch.Tensor
        Parameters whose gradients are reduced as one unit: so many groups, or these.
    sparse_as_dense : bool
        Whether to reduce sparse gradients as dense ones, and not by their rows.
    process_set : ProcessSet
        The ranks that take part; elsewhere the optimizer works alone.
    reduce_at : {"backward", "step"}
        What waits for the reduction. With ``"step"`` gradients must not be changed before it.
    unused : {"none", "zeros"}
        By default a gradient that no rank has stays None. With ``"zeros"`` it becomes zeros, as in Horovod.
    """
    _check_factors(gradient_predivide_factor, op, backward_passes_per_step)
    names = _check_kinds(_name_parameters(optimizer, named_parameters))
    chosen = _check_groups(groups, num_groups, list(names))
    _check_modes(op, reduce_at, unused, plain=not (chosen or sparse_as_dense))
    if isinstance(optimizer, _DistributedOptimizer):
        optimizer.remove()
    way = _Way(names)
    if process_set.included() and (process_set.size() or 1) > 1:
        if op is Adasum:
            way.combines_steps, way.position = process_set, Position(process_set)
        else:
            how = (compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense)
            kind = unused == "zeros", reduce_at == "step", isinstance(optimizer, torch.optim.SparseAdam)
            way.reducer = Reducer(names, chosen, Terms(*how, process_set, *kind))
    return _wrap(optimizer, way)


@dataclass(eq=False)
class _Way:
    """How one optimizer is distributed."""

    names: dict[Any, str]
    reducer: Reducer | None = None
    combines_steps: ProcessSet | None = None  # by Adasum
    position: Position | None = None  # with Adasum
    own_step: Callable[..., Any] | None = None  # what its instance had in place of its class's step()
    steps_alone: bool = False
    is_asked: bool = False  # whether the program has called synchronize() in this step


class _DistributedOptimizer:
    """The methods of every distributed optimizer, before those of the class that it had."""

    @functools.cached_property
    def _way(self) -> _Way:
        """Of an instance of a class derived from a distributed one: it works alone until it is wrapped."""
        return _Way({})

    @property
    def _parameter_names(self) -> dict[Any, str]:
        return self._way.names

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce all gradients, and step; a closure's gradients are reduced after each of its calls.

        Ranks that decide by the closure's loss, as LBFGS does, need one loss: it is averaged.
        """
        way, reducer = self._way, self._way.reducer
        if way.combines_steps is not None:
            return self._step_by_adasum(way.combines_steps, closure)
        if reducer is None:
            return self._step_alone(closure)
        if way.steps_alone:
            if reducer.is_open:
                raise RuntimeError(
                    "step() inside skip_synchronize() after a backward pass that has failed: call zero_grad()"
                )
        elif closure is not None:
            result = self._step_alone(functools.partial(_reduced_loss, closure, reducer))
            reducer.stepped()
            return result
        elif not reducer.is_synchronized:
            reducer.synchronize()
        elif way.is_asked:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after"
                " optimizer.synchronize(): the gradients are reduced already, and are not reduced again",
                stacklevel=2,
            )
        way.is_asked = False
        reducer.stepped()
        return self._step_alone(closure)

    # torch wraps the step of a class once, so that hooks run; the class below has been wrapped.
    step.hooked = True  # type: ignore[attr-defined]

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        arguments = () if closure is None else (closure,)
        own = self._way.own_step
        return super().step(*arguments) if own is None else own(*arguments)  # type: ignore[misc]

    def _step_by_adasum(self, process_set: ProcessSet, closure: Callable[[], Any] | None) -> Any:
        """Step by itself, then combine the ranks' changes of the weights."""
        position = self._way.position
        assert position is not None
        position.renew()
        figures = np.array(position.figures(), np.int64)
        name = f"{position.prefix}: places"
        sums = collectives.allreduce(figures, name=name, op=collectives.Sum, process_set=process_set)
        if not position.are_alike(sums):
            position.refuse()
        position.steps += 1
        parameters = [each for each in self._way.names if each.requires_grad]
        with torch.no_grad():
            before = [each.clone() for each in parameters]
        result = self._step_alone(closure)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.sub_(old)
            collectives.grouped_allreduce_(
                [each.detach() for each in parameters],
                name=f"{position.prefix}: steps",
                op=Adasum,
                process_set=process_set,
            )
            for parameter, old in zip(parameters, before, strict=True):
                parameter.add_(old)
        return result

    def synchronize(self) -> None:
        """Reduce all gradients that the backward pass has not reduced, and wait."""
        way = self._way
        if way.reducer is not None:
            if not way.reducer.is_synchronized:
                way.reducer.synchronize()
            way.is_asked = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let :meth:`step` reduce nothing, because :meth:`synchronize` has."""
        before, self._way.steps_alone = self._way.steps_alone, True
        try:
            yield
        finally:
            self._way.steps_alone = before

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes accumulate gradients without counting them, and without a reduction."""
        reducer = self._way.reducer
        before = reducer is not None and reducer.pause(paused=True)
        try:
            yield
        finally:
            if reducer is not None:
                reducer.pause(paused=before)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes before a reduction, and count anew."""
        if passes <= 0:
            raise ValueError(f"passes={passes}: expected 1 or more")
        if self._way.reducer is not None:
            self._way.reducer.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget all gradients; after a backward pass that has failed, end its step for the other ranks."""
        way = self._way
        try:
            if way.reducer is not None:
                way.reducer.zeroing()
            elif way.position is not None:
                way.position.renew()
                way.position.zeroings += 1
        finally:
            super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, after the reductions that are under way."""
        if self._way.reducer is not None:
            self._way.reducer.abandon()
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; every rank must add the same."""
        super().add_param_group(param_group)  # type: ignore[misc]
        number = len(self.param_groups) - 1  # type: ignore[attr-defined]
        added = _check_kinds(_default_names(self, number))
        self._way.names.update(added)
        if self._way.reducer is not None:
            self._way.reducer.add(added)

    def remove(self) -> None:
        """Give the optimizer its own class back, and remove all hooks."""
        way = self.__dict__.pop("_way")
        self.__dict__.pop("step", None)
        self.__class__ = _own_class(type(self))
        if way.own_step is not None:
            self.step = way.own_step  # type: ignore[method-assign]
        if way.reducer is not None:
            way.reducer.remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the optimizer that it was: hooks and reductions belong to this process."""
        return _new, (_own_class(type(self)),), self.__getstate__()


def _wrap(optimizer: Any, way: _Way) -> Any:
    """Give an optimizer the class that distributes it."""
    way.own_step = vars(optimizer).pop("step", None)
    given: Any = type(optimizer)
    derived = _derive(given)
    optimizer.__class__ = derived
    optimizer._way = way
    if way.own_step is not None:
        # A scheduler has put it there, and looks for its mark, which wraps() copies.
        reference = weakref.ref(optimizer)

        @functools.wraps(way.own_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            return derived.step(reference(), *args, **kwargs)

        optimizer.step = step
    return optimizer


def _new(given: Any) -> Any:
    return given.__new__(given)


@functools.cache
def _derive(given: Any) -> Any:
    if issubclass(given, _DistributedOptimizer):
        return given
    return type(given.__name__, (_DistributedOptimizer, given), {"__module__": given.__module__})


def _own_class(derived: Any) -> Any:
    """Return the class that an optimizer had before it was wrapped."""
    return derived.__mro__[2] if derived.__mro__[1] is _DistributedOptimizer else derived


def _reduced_loss(closure: Callable[[], Any], reducer: Reducer) -> Any:
    """Call a closure, reduce its gradients, and return the average of the ranks' losses."""
    with torch.enable_grad():
        loss = closure()
    if not reducer.is_synchronized:
        reducer.synchronize()
    is_tensor = isinstance(loss, torch.Tensor)
    given = loss.detach() if is_tensor else np.float64(loss)
    mean = collectives.allreduce(
        given, name=f"{reducer.position.prefix}: loss", process_set=reducer.terms.process_set
    )
    return mean if is_tensor else float(mean)


# -- arguments -----------------------------------------------------------------------------------------


def _check_modes(op: ReduceOp, reduce_at: str, unused: str, *, plain: bool) -> None:
    if reduce_at not in ("step", "backward"):
        raise ValueError(f'reduce_at={reduce_at!r}: expected "step" or "backward"')
    if unused not in ("zeros", "none"):
        raise ValueError(f'unused={unused!r}: expected "zeros" or "none"')
    if op is Adasum and (not plain or reduce_at == "step"):
        raise NotImplementedError(
            "op=Adasum combines changes of the weights, not gradients: it supports neither groups nor"
            ' sparse_as_dense and reduce_at="step"'
        )


def _check_factors(factor: float, op: ReduceOp, passes: int) -> None:
    if factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op other than Average")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step={passes}: expected 1 or more")


def _check_kinds(names: dict[Any, str]) -> dict[Any, str]:
    """Return the same names of parameters; raise TypeError if the gradient of one cannot be reduced."""
    for parameter, name in names.items():
        why = "" if parameter.is_cuda and not is_lazy(parameter) else why_not(parameter)
        if getattr(parameter, "_is_flat_param", False):
            why = "FullyShardedDataParallel reduces its gradients itself: use the optimizer as it is"
        if why:
            raise TypeError(f"DistributedOptimizer, parameter {name!r}: {why}")
    return names


def _name_parameters(optimizer: Any, named: Iterable[tuple[str, Any]] | None) -> dict[Any, str]:
    """Return the optimizer's parameters, in its order, with their names."""
    wanted = {
        parameter: name
        for number in range(len(optimizer.param_groups))
        for parameter, name in _default_names(optimizer, number).items()
    }
    if named is None:
        return wanted
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by"
            " model.named_parameters()."
        )
    counts = Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    names: dict[Any, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    if unnamed := [default for parameter, default in wanted.items() if parameter not in names]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named:"
            f" {', '.join(unnamed)}, counted by group and place in the optimizer"
        )
    return {parameter: names[parameter] for parameter in wanted}


def _default_names(optimizer: Any, number: int) -> dict[Any, str]:
    """Return the parameters of one group with the names that torch knows, or with their places."""
    group = optimizer.param_groups[number]
    known = group.get("param_names")  # torch has them since 2.6
    return {
        parameter: known[place] if known else f"allreduce.noname.{number}.{place}"
        for place, parameter in enumerate(group["params"])
    }


def _check_groups(groups: Any, number: int, parameters: Sequence[Any]) -> list[list[Any]]:
    """Return the parameters of each group that the user wants."""
    if number:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
    if groups is None:
        if not number:
            return []
        groups = number
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise ValueError(f"groups={groups}: expected a positive number, or lists of parameters")
        count = min(groups, len(parameters))
        starts = [len(parameters) * number // count for number in range(count + 1)]
        return [list(parameters[a:b]) for a, b in itertools.pairwise(starts)]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(each, (list, tuple)) for each in groups):
        raise ValueError("groups: expected a positive number, or lists of parameters")
    seen: set[int] = set()
    for each in itertools.chain.from_iterable(groups):
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"groups: expected parameters, not {type(each).__name__}")
        if id(each) in seen:
            raise ValueError("groups: a parameter is in two groups, or twice in one")
        seen.add(id(each))
    return [list(each) for each in groups]
