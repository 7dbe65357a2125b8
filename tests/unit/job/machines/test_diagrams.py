"""The diagrams of states in docstrings are those of the code."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from pyhvd.job.machines import agent_pool, membership

ARROW = re.compile(r"^    (\w+) -+ ([a-z ]+?) -+> (\w+)$", re.MULTILINE)


@pytest.mark.parametrize("module", [agent_pool, membership])
def test_each_move_is_drawn(module: ModuleType) -> None:
    assert module.__doc__ is not None
    drawn = ARROW.findall(module.__doc__)
    moves = [(before.name, event, after.name) for (before, event), after in module._MOVES.items()]
    assert drawn == moves
