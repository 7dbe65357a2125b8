"""Programs that import from the earlier path, pyhvd.testing.simulation, get the same objects."""

from __future__ import annotations

import pyhvd.simulation.data_path
import pyhvd.testing.simulation.data_path


def test_same_objects() -> None:
    earlier, now = pyhvd.testing.simulation, pyhvd.simulation
    assert earlier.__all__ == now.__all__
    assert all(getattr(earlier, name) is getattr(now, name) for name in now.__all__)
    assert earlier.data_path.DataPath is now.data_path.DataPath
