"""What the ranks compare before the first step, so that a difference is an error with all its parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pyhvd.api.objects import allgather_object
from pyhvd.api.process_sets import ProcessSet
from pyhvd.api.topology import rank
from pyhvd.common.text import describe_values
from pyhvd.errors import MismatchError

_AUTO_NUMBER = re.compile(r"_\d+(?=/|$)")


def name_without_numbers(variable: Any) -> str:
    """Return the names of a variable and its layer, without the numbers that its framework appends.

    A rank that has made other layers before has other numbers. The names of the models around the layer are
    left out: Keras drops one of them when it loads a model.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> name_without_numbers(SimpleNamespace(path="sequential/dense_3/kernel", name="kernel"))
    'dense/kernel'
    """
    path = str(getattr(variable, "path", None) or variable.name)
    return _AUTO_NUMBER.sub("", "/".join(path.split("/")[-2:]))


def agree(mine: Mapping[str, str], what: str, process_set: ProcessSet) -> None:
    """Compare texts of all ranks of a set.

    Parameters
    ----------
    mine : mapping of str to str
        What this rank has, by its name.
    what : str
        What is compared, the same on all ranks; the collective's name follows from it.
    process_set : ProcessSet
        The ranks that take part.

    Raises
    ------
    MismatchError
        The ranks differ; the text names every difference and the ranks.
    """
    everyone = dict(allgather_object((rank(), dict(mine)), name=f"{what}: compared", process_set=process_set))
    names = dict.fromkeys(name for each in everyone.values() for name in each)
    lines = []
    for name in names:
        values = {number: each.get(name, "absent") for number, each in everyone.items()}
        if len(set(values.values())) > 1:
            lines.append(f"{name}: {describe_values(values)}")
    if lines:
        raise MismatchError(f"{what}: the ranks differ:\n" + "\n".join(lines), what)
