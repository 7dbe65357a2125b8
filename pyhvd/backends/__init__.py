"""Backends: how the bytes of an agreed collective move.

Only ``backends/mpi.py``, ``mpi_transport.py`` and ``mpi_world.py`` touch MPI.
"""
