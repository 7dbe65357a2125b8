"""Which gradients are reduced together; pure, and the same for all frameworks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def checked_groups(groups: Any, number: int) -> int | list[list[Any]] | None:
    """Return the groups that the user wants, from the arguments ``groups`` and ``num_groups``.

    Raises
    ------
    ValueError
        They are neither a positive number, nor lists of variables of which each is in one group.
    """
    chosen = (number or None) if groups is None else groups
    if chosen is None:
        return None
    if isinstance(chosen, int) and not isinstance(chosen, bool) and chosen > 0:
        return chosen
    if not isinstance(chosen, list | tuple) or not all(isinstance(each, list | tuple) for each in chosen):
        raise ValueError(f"groups={chosen!r}: expected a positive number, or lists of variables")
    seen = [id(variable) for group in chosen for variable in group]
    if len(set(seen)) < len(seen):
        raise ValueError("groups: a variable is in two groups, or twice in one")
    return [list(each) for each in chosen]


def divide(keys: Sequence[Any], groups: int | Sequence[Sequence[Any]] | None) -> list[list[int]]:
    """Return the places of the gradients of each group.

    Parameters
    ----------
    keys : sequence
        By which each gradient's variable is known; hashable.
    groups : int, sequence of sequences of keys, or None
        So many groups, in the order of the gradients; or these, and each other gradient alone; or one group.
    """
    places = range(len(keys))
    if groups is None:
        made = [list(places)]
    elif isinstance(groups, int):
        count = min(groups, len(keys))
        bounds = [len(keys) * number // count for number in range(count + 1)] if count else []
        made = [list(places[first:last]) for first, last in itertools.pairwise(bounds)]
    else:
        by_key = {key: place for place, key in enumerate(keys)}
        made = [[by_key[key] for key in group if key in by_key] for group in groups]
        taken = {place for group in made for place in group}
        made += [[place] for place in places if place not in taken]
    return [group for group in made if group]
