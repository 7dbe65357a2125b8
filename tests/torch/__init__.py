"""Tests with torch; each of them is skipped where torch is not installed."""

import pytest

pytest.importorskip("torch")
