"""Which combinations of parameters `make test` runs: so many that every value of every parameter occurs.

Each ``parametrize`` decorator is one axis, whose value may be several parameters chosen together; rank counts
are always an axis of their own. A test with one axis runs whole. The choice is the same in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import pytest

# Whether searches of Hypothesis run in full: pytest --full, as in `make test-all`, or --rest.
full = False
# Whether the longest of them do: pytest --long, as in `make test-stress`.
long = False
RANK_COUNTS = ("nranks", "size")

Value = tuple[tuple[str, Hashable], ...]


def examples(number: int, *, longest: bool = False) -> int:
    """Return how many of its examples a search of Hypothesis tries: all in a full run, else a tenth.

    The `longest` searches try a tenth and a twentieth, and all with ``--long``.
    """
    if longest and not long:
        return number // 10 if full else number // 20
    return number if full else number // 10


def is_search(item: pytest.Item) -> bool:
    """Return whether Hypothesis chooses the test's examples: a full run has more of them."""
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def each_value_once(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests to run; those that are not parametrised are among them."""
    kept: set[pytest.Item] = set()
    functions: dict[tuple[object, ...], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions.setdefault((item.path, item.parent, item.originalname), []).append(item)
        else:
            kept.add(item)
    for variants in functions.values():
        kept.update(variants[index] for index in choose(_values(variants)))
    return kept


def choose(combinations: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the indices of combinations that together have all values, few of them, with values used evenly.

    Examples
    --------
    >>> choose([("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1), ("c", 2)])
    [0, 3, 4]
    """
    if all(len(combination) == 1 for combination in combinations):
        return list(range(len(combinations)))
    uses = Counter[Hashable]()
    missing = {value for combination in combinations for value in combination}
    chosen: list[int] = []
    while missing:
        best = max(
            range(len(combinations)),
            key=lambda index: (
                sum(value in missing for value in combinations[index]),
                -sum(uses[value] for value in combinations[index]),
                -index,
            ),
        )
        chosen.append(best)
        uses.update(combinations[best])
        missing.difference_update(combinations[best])
    return sorted(chosen)


def _values(variants: Sequence[pytest.Function]) -> list[list[Value]]:
    """Return each variant's values, one for each axis."""
    decorator: dict[str, object] = {}
    for mark in variants[0].iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        decorator.update(dict.fromkeys(names, mark))
    axes: dict[object, list[str]] = {}
    for name in variants[0].callspec.params:
        axes.setdefault(name if name in RANK_COUNTS else id(decorator.get(name, name)), []).append(name)
    return [
        [tuple((name, id(item.callspec.params[name])) for name in names) for names in axes.values()]
        for item in variants
    ]
