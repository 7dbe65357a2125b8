"""How one optimizer's gradients are reduced: which of them, in which groups, under which names.

A :class:`GradientReduction` belongs to one optimizer. Its methods run when a step runs eagerly, or when a
backend traces the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from pyhvd.api.collectives import Max, Min
from pyhvd.api.compression import compress_all, decompress_all
from pyhvd.engine import context
from pyhvd.frameworks.agreement import agree, name_without_numbers
from pyhvd.frameworks.gradients import GradientOptions
from pyhvd.frameworks.grouping import divide
from pyhvd.keras.backend import ReductionTerms, door


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(GradientOptions):
    """What the user has asked of :func:`DistributedOptimizer`."""

    name: str | None
    passes: int
    averages_passes: bool

    def described(self) -> dict[str, str]:
        """Return the options that ranks must share, as texts."""
        return super().described() | {
            "backward_passes_per_step": str(self.passes),
            "average_aggregated_gradients": str(self.averages_passes),
        }


class GradientReduction:
    """The reduction of one optimizer's gradients.

    Parameters
    ----------
    options : OptimizerOptions
        What the user has asked for.
    """

    def __init__(self, options: OptimizerOptions) -> None:
        self.options = options
        self.local: set[Any] = set()  # keys of local variables, see key_of()
        self._variables: list[Any] | None = None  # of the gradients that the hook gets
        self._prefix = ""
        self._context: weakref.ref[Any] | None = None  # for which _prefix holds
        self._is_compared = False

    @property
    def prefix(self) -> str:
        """How the names of the collectives begin; it lasts from ``init()`` to ``shutdown()``.

        Without a name of the user's, a number counts the optimizers by the order of their first steps.
        """
        active = context.current()
        if self._context is None or self._context() is not active:
            kept = context.KeptName("keras.gradients").in_set(self.options.process_set)
            self._prefix = kept if self.options.name is None else self.options.name
            self._context, self._is_compared = weakref.ref(active), False
        return self._prefix

    # -- one step --------------------------------------------------------------------------------------

    def begin(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Prepare for the hook, which gets no variables; return the gradients with which the step goes on.

        Gradients that overwrite their variables, such as scales of float8, never reach the hook: they are
        reduced here, by Max.
        """
        grads, places = list(grads), range(len(grads))
        if self.options.is_needed:
            door().check_step()
            self._compare(optimizer, grads, variables)
        present = [place for place in places if grads[place] is not None]
        overwriting = [
            place for place in present if getattr(variables[place], "overwrite_with_gradient", False)
        ]
        if overwriting and self.options.is_needed:
            terms = ReductionTerms(f"{self.prefix}: overwriting", Max, process_set=self.options.process_set)
            given = [keras.ops.convert_to_tensor(grads[place]) for place in overwriting]
            for place, new in zip(overwriting, door().reduce(given, terms), strict=True):
                grads[place] = new
        self._variables = [variables[place] for place in present if place not in overwriting]
        return grads

    def end(self, optimizer: Any) -> None:
        """Check that the optimizer has called the hook, unless the step may only accumulate."""
        is_missed = self._variables and not optimizer.gradient_accumulation_steps
        self._variables = None
        if is_missed and self.options.is_needed:
            raise RuntimeError(
                f"{type(optimizer).__name__}.apply() has not called _clip_gradients(), the method in which"
                " pyhvd reduces gradients: this optimizer cannot be distributed"
            )

    def reduce(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of the step under way, in the same order."""
        variables, self._variables = self._variables, []
        if variables is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}._clip_gradients() was called outside of apply(), so that pyhvd"
                " does not know the variables of the gradients: call apply()"
            )

        def change(given: Sequence[Any]) -> list[Any]:
            return self._changed(optimizer, list(given), variables)

        result: list[Any] = door().at_updates(optimizer, change, list(grads))
        return result

    def reduce_given(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of a step whose optimizer hands over its variables with them."""
        if self.options.is_needed:
            door().check_step()
            self._compare(optimizer, grads, variables)
        results = list(grads)
        present = [place for place, grad in enumerate(grads) if grad is not None]
        given = [grads[place] for place in present]
        reduced = self._changed(optimizer, given, [variables[place] for place in present])
        for place, new in zip(present, reduced, strict=True):
            results[place] = new
        return results

    def agree_on(self, finite: Any) -> Any:
        """Return whether the gradients of all ranks are finite, from whether this rank's are."""
        if not self.options.is_needed:
            return finite
        door().check_step()
        terms = ReductionTerms(f"{self.prefix}: finite", Min, process_set=self.options.process_set)
        number = keras.ops.cast(finite, "int32")
        return keras.ops.cast(door().reduce([number], terms)[0], "bool")

    # -- its parts -------------------------------------------------------------------------------------

    def _changed(self, optimizer: Any, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return reduced gradients, those of local variables scaled."""
        options = self.options
        is_local = [key_of(optimizer, each) in self.local for each in variables]
        factor = 1.0 if options.averages_passes else float(options.passes)
        if self.options.is_needed:
            shared = [place for place, local in enumerate(is_local) if not local]
            for number, group in enumerate(self._groups(optimizer, shared, variables)):
                name = f"{self.prefix}: {number}" if number else self.prefix
                reduced = self._reduce_group([grads[place] for place in group], name, factor)
                for place, new in zip(group, reduced, strict=True):
                    grads[place] = new
            own = factor / (options.process_set.size() or 1) if options.scales_local else factor
            left = [place for place, local in enumerate(is_local) if local]
        else:
            own, left = factor, list(range(len(grads)))
        if own != 1.0:
            for place in left:
                grads[place] = door().scaled(grads[place], own)
        return grads

    def _reduce_group(self, grads: list[Any], name: str, factor: float) -> list[Any]:
        options, gate = self.options, door()
        after = options.predivide * factor
        terms = ReductionTerms(name, options.op, 1.0 / options.predivide, after, options.process_set)
        if options.sparse_as_dense:
            grads = [gate.densify(each) for each in grads]
        results = list(grads)
        dense = [place for place, each in enumerate(grads) if not gate.is_sparse(each)]
        sent, contexts = compress_all(options.compression, [grads[place] for place in dense])
        if sent:
            reduced = decompress_all(options.compression, gate.reduce(sent, terms), contexts)
            for place, new in zip(dense, reduced, strict=True):
                results[place] = new
        for place, each in enumerate(grads):
            if place not in dense:
                results[place] = gate.reduce_sparse(each, terms._replace(name=f"{name}: sparse {place}"))
        return results

    def _groups(self, optimizer: Any, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Return the places of the gradients that are reduced together."""
        groups = self.options.groups
        if isinstance(groups, list):
            groups = [[key_of(optimizer, variable) for variable in group] for group in groups]
        keys = [key_of(optimizer, variables[place]) for place in places]
        return [[places[number] for number in group] for group in divide(keys, groups)]

    def _compare(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Compare what the ranks would reduce, once after ``init()``."""
        prefix = self.prefix
        if self._is_compared:
            return
        mine = self.options.described()
        for place, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            words = self._in_words(optimizer, grad, variable)
            mine[f"variable {place}"] = f"{name_without_numbers(variable)!r}, {words}"
        agree(mine, prefix, self.options.process_set)
        self._is_compared = True

    def _in_words(self, optimizer: Any, grad: Any, variable: Any) -> str:
        parts = [f"{keras.backend.standardize_dtype(variable.dtype)} {list(variable.shape)}"]
        if grad is None:
            parts.append("without a gradient")
        if key_of(optimizer, variable) in self.local:
            parts.append("local")
        return ", ".join(parts)


def key_of(optimizer: Any, variable: Any) -> Any:
    """Return by what an optimizer knows a variable: of Keras, or the backend's own below it."""
    own = getattr(optimizer, "_var_key", None)  # the older family of tf_keras has none
    return id(variable) if own is None else own(variable)
