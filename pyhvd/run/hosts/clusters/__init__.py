"""Detectors: whether another launcher started this process as a rank, or a cluster allocated hosts to it.

``slurm`` has a module of its own, with ``find_rank(environ)`` and ``find_allocation(around)``. ``small`` has
the other systems, ``detection`` the marks and the order of all. All are pure: they read the environment that
they are given, and files through ``around.read``.
"""
