"""The error of a script that is not there."""

from __future__ import annotations

import os
import sys

import pytest

from pyhvd.run.entry.missing_script import describe_missing


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "pythn",
            "pyhvd: there is no Python script 'pythn' in /d, and no command of this name: did you mean"
            " 'python'?",
        ),
        ("frobnicate", "pyhvd: there is no Python script 'frobnicate' in /d, and no command of this name"),
        (
            "sh",
            "pyhvd: there is no Python script 'sh' in /d: pyhvdrun runs Python programs only; horovodrun runs"
            " the command 'sh' too",
        ),
        ("train.py", "PYTHON: can't open file '/d/train.py': [Errno 2] No such file or directory"),
        ("./train", "PYTHON: can't open file '/d/./train': [Errno 2] No such file or directory"),
    ],
)
def test_a_script_that_is_not_there(script: str, text: str) -> None:
    assert describe_missing(script, "/d") == text.replace("PYTHON", os.path.basename(sys.executable))
