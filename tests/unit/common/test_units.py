"""Sizes, times and rates: read from flags, and written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyhvd.common.units import bit_rate, parse_rate, parse_size, parse_span


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512", 512), ("512B", 512), ("1KiB", 1024), ("4MB", 4_000_000), ("1.5 GiB", 3 << 29), ("2kB", 2000)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("20us", 20e-6), ("0.1ms", 1e-4), ("5µs", 5e-6), ("2 s", 2.0), ("1.5min", 90.0)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_span(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25gbit", 25e9 / 8),
        ("1Gbit/s", 1e9 / 8),
        ("100Gbps", 100e9 / 8),
        ("12.5GB/s", 12.5e9),
        ("800bit", 100),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("parse", "texts", "expected"),
    [
        (parse_size, ["", "KiB", "-1", "1Kib", "1iB", "4 Mbit"], "is no size: expected bytes, such as"),
        (parse_span, ["", "20", "ms", "-1ms", "1h"], "is no time: expected us, ms, s or min"),
        (parse_rate, ["25", "25gb", "0gbit", "-1gbit", "12.5GB"], "is no rate: expected more than 0 bits"),
    ],
)
def test_what_cannot_be_read(parse: Callable[[str], float], texts: list[str], expected: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=expected) as info:
            parse(text)
        assert repr(text) in str(info.value)


def test_rates_are_written_in_bits() -> None:
    assert [bit_rate(rate) for rate in (25e9 / 8, 1e9 / 8, 117.5e6 / 8, 5e11, 1.0)] == [
        "25 Gbit/s",
        "1 Gbit/s",
        "117.5 Mbit/s",
        "4 Tbit/s",
        "8 bit/s",
    ]
