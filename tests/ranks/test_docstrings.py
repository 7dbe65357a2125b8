"""Run the examples of the public docstrings, which are part of the reference, on one rank each."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import pyhvd
from pyhvd import testing
from pyhvd.testing import run_ranks

PUBLIC: dict[str, Any] = {
    **{name: getattr(pyhvd, name) for name in pyhvd.__all__},
    **{f"testing.{name}": getattr(testing, name) for name in testing.__all__},
}
EXAMPLES = {
    found.name: found
    for name, thing in PUBLIC.items()
    if isinstance(thing, type) or callable(thing)
    for found in doctest.DocTestFinder(exclude_empty=True).find(thing, name, module=False, globs={})
    if found.examples
}


def test_there_are_examples() -> None:
    assert {"init", "empty", "metrics", "testing.run_ranks"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYHVD_FAST_LANE", raising=False)  # the examples assume a rank with default settings
    report: list[str] = []

    def run() -> None:
        doctest.DocTestRunner().run(EXAMPLES[name], out=report.append)
        pyhvd.shutdown()

    run_ranks(1, run, init=False)
    assert not report, "".join(report)
