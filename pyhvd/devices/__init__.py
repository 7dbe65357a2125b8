"""Take and return arrays on GPUs: devices, streams, array libraries and pack kernels.

Importing this package imports neither CuPy nor torch nor JAX; the first array of a library does.
"""
