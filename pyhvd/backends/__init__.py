"""Backends: how the bytes of an agreed collective move. Only here and in transport.py is MPI touched."""
