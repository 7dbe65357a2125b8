"""The name ``horovod``: which package an import finds."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HorovodName:
    """Which ``horovod`` can be imported; ``remedy`` is empty unless two packages have damaged each other."""

    found: str = "none: pip install pyhvd-horovod, or pyhvdrun --as-horovod"
    remedy: str = ""


def find_horovod() -> HorovodName:
    """Return which ``horovod`` this Python imports, without importing it."""
    from importlib.util import find_spec

    horovod, alias = _find_version("horovod"), _find_version("pyhvd-horovod")
    spec = find_spec("horovod")
    origin = spec.origin if spec is not None else None
    if horovod and alias:
        found = f"both Horovod {horovod} and pyhvd-horovod {alias}"
        return HorovodName(found, explain_two_owners())
    if origin is None and (horovod or alias):
        name = "horovod" if horovod else "pyhvd-horovod"
        remedy = (
            f"{name} is installed, but its files are gone, as after the uninstallation of another package"
            f" with the folder horovod: pip install --force-reinstall --no-deps {name}"
        )
        return HorovodName(f"none: the files of {name} {horovod or alias} are gone", remedy)
    if origin is None:
        return HorovodName()
    with open(origin, encoding="utf-8", errors="replace") as file:
        is_alias = "__pyhvd__" in file.read()
    if is_alias:
        return HorovodName(f"pyhvd, by {f'pyhvd-horovod {alias}' if alias else 'a path'}, {origin}")
    return HorovodName(f"Horovod {horovod or 'of unknown version'} itself, {origin}")


def explain_two_owners() -> str:
    """Return what to do if pyhvd-horovod and Horovod itself are installed; empty if they are not.

    pip lets both write into the folder ``horovod``.
    """
    version = _find_version("horovod")
    if not version:
        return ""
    return (
        f"both pyhvd-horovod and horovod {version} are installed, and own the folder horovod. To use pyhvd:"
        " pip uninstall -y horovod pyhvd-horovod && pip install pyhvd-horovod. To use Horovod: pip uninstall"
        " -y pyhvd-horovod horovod && pip install horovod"
    )


def _find_version(name: str) -> str:
    """Return the version of an installed distribution with files in the folder ``horovod``; empty if none."""
    from importlib import metadata

    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return ""
    # Since Python 3.12 distribution.files leaves out what is gone.
    record = distribution.read_text("RECORD") or ""
    return distribution.version if re.search("^horovod/", record, re.MULTILINE) else ""
