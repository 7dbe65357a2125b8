"""Keeps torch.compile out of methods that C++ code calls inside a compiled region.

Dynamo would trace them as if the program had called them, and fails. A flag on a method's code object tells
Dynamo to run the method and all that it calls as they are. It costs nothing per call, unlike the wrapper of
``torch.compiler.disable``, and does not import Dynamo, which takes seconds.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

_dynamo: Any = torch._C._dynamo.eval_frame


_T = TypeVar("_T", bound=type)


def untraced(cls: _T) -> _T:
    """Let Dynamo run the methods of a class as they are."""
    for name, method in list(vars(cls).items()):
        if not isinstance(method, FunctionType):
            continue
        if hasattr(_dynamo, "set_code_exec_strategy"):
            action = _dynamo._FrameAction.SKIP  # of the method's frame, and of those below it
            _dynamo.set_code_exec_strategy(method.__code__, _dynamo._FrameExecStrategy(action, action))
        else:  # before torch 2.7
            setattr(cls, name, torch.compiler.disable(method))
    return cls
