"""Detectors: whether another launcher started this process as a rank, or a cluster allocated hosts to it.

One module per system, with ``find_rank(environ)``, ``find_allocation(around)``, or both; ``detection`` has
their order. All are pure: they read the environment that they are given, and files through ``around.read``.
"""
