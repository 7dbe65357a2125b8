"""Sizes, times and rates as text with units: written by the subcommands, and read from their flags."""

from __future__ import annotations

import re

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)\s*"


def size(nbytes: float) -> str:
    """Return bytes with a unit: ``"64 MiB"``."""
    for prefix in "TGMK":
        factor = _BINARY[prefix]
        if nbytes >= factor:
            digits = ".3g" if nbytes < 1000 * factor else ".0f"
            return f"{nbytes / factor:{digits}} {prefix}iB"
    return f"{nbytes:.0f} B"


def span(seconds: float) -> str:
    """Return a time with a unit: ``"12.3 us"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def bit_rate(bytes_per_second: float) -> str:
    """Return a link's rate in bits: ``"25 Gbit/s"``."""
    for prefix, unit in (("T", "Tbit/s"), ("G", "Gbit/s"), ("M", "Mbit/s"), ("K", "kbit/s")):
        if 8 * bytes_per_second >= _DECIMAL[prefix]:
            return f"{8 * bytes_per_second / _DECIMAL[prefix]:.4g} {unit}"
    return f"{8 * bytes_per_second:.4g} bit/s"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``1KiB``, ``4MB`` or ``512``.

    Raises
    ------
    ValueError
        The text says what is expected.
    """
    found = re.fullmatch(_NUMBER + r"(?:([kKMGT]?)(i?)B)?", text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is no size: expected bytes, such as 1KiB, 4MB or 512")
    factors = _BINARY if found[3] else _DECIMAL
    return round(float(found[1]) * factors[(found[2] or "").upper()])


def parse_span(text: str) -> float:
    """Return the seconds of a time such as ``20us``, ``0.1ms`` or ``2s``; see :func:`parse_size`."""
    found = re.fullmatch(_NUMBER + "(us|µs|ms|s|min)", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no time: expected us, ms, s or min, such as 20us or 0.1ms")
    return float(found[1]) * _SECONDS[found[2].replace("µ", "u")]


def parse_rate(text: str) -> float:
    """Return the bytes per second of a rate such as ``25gbit`` or ``12.5GB/s``; see :func:`parse_size`."""
    found = re.fullmatch(_NUMBER + r"([kKmMgGtT]?)((?i:bit)(?:/s)?|bps|B/s)", text.strip())
    if found is None or not float(found[1]):
        raise ValueError(
            f"{text!r} is no rate: expected more than 0 bits or bytes per second, such as 25gbit, 1Gbit/s or"
            " 12.5GB/s"
        )
    return float(found[1]) * _DECIMAL[found[2].upper()] / (1 if found[3] == "B/s" else 8)
