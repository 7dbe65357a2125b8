"""The model of :mod:`pyhvd.simulation.data_path` under its earlier path."""

from pyhvd.simulation.data_path import Cost as Cost, DataPath as DataPath, Machine as Machine
