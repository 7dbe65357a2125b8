"""Imports of the libraries for data; an error names the extra that installs them."""

from __future__ import annotations

import importlib
from typing import Any

from pyhvd.spark.errors import SparkError


def needed(module: str) -> Any:
    """Import and return a module of a package that the extra `spark` installs.

    Raises
    ------
    SparkError
        The package cannot be imported here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.partition(".")[0]
        raise SparkError(f'{package} cannot be imported ({exc}): pip install "pyhvd[spark]"') from None
