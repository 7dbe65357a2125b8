"""Detectors: whether another launcher started this process as a rank, or a cluster allocated hosts to it.

Systems that need more than a few variables have a module each, with ``find_rank(environ)``,
``find_allocation(around)``, or both. ``small`` has the others, ``detection`` the order of all. All are pure:
they read the environment that they are given, and files through ``around.read``.
"""
