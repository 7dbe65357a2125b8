"""Arrays on GPUs: what is asked of a device, whose arrays they are, and how they travel.

Nothing here imports CuPy, torch or JAX before an array of theirs has been submitted.
"""
