"""What this package needs of TensorFlow that TensorFlow does not export; checked with 2.21."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config as autograph
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util
from tensorflow.python.util import tf_stack

from pyhvd.errors import HorovodInternalError, UnsupportedDtypeError
from pyhvd.native.shared_memory import hide_sites

_PYHVD = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_TENSORFLOW = os.path.join(os.path.dirname(os.path.abspath(tf.__file__)), "")

# Autograph rewrites what a traced function calls. That of this package would stay the same, but for warnings.
autograph.CONVERSION_RULES = (autograph.DoNotConvert("pyhvd"), *autograph.CONVERSION_RULES)

# Autograph raises errors of other classes than Python's own as one of its own, but for these.
for _class in (HorovodInternalError, UnsupportedDtypeError):
    setattr(_class, "ag_pass_through", True)  # noqa: B010 - it has no such attribute for type checkers

hide_sites(_TENSORFLOW)


def is_recording() -> bool:
    """Return whether a tape may record what is done in this thread."""
    return bool(record.could_possibly_record())


def check_not_xla() -> None:
    """Raise ValueError if the function that is being traced is compiled by XLA."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "XLA cannot compile collectives of pyhvd, and a function with jit_compile=True is being traced:"
            " pass tf.function(jit_compile=False), or model.compile(jit_compile=False)"
        )


def run_independently(operation: Any) -> None:
    """Let an op of a traced function run in any order with other ops that have side effects."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def find_site() -> str:
    """Return the program's line that is being traced, as ``"train.py:41 in step"``."""
    for frame in reversed(tf_stack.extract_stack()):
        if not frame.filename.startswith((_PYHVD, _TENSORFLOW)):
            return f"{os.path.relpath(frame.filename)}:{frame.lineno} in {frame.name}"
    return "an unknown line"
