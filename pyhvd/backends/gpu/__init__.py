"""Collectives on arrays in GPU memory: NCCL, and staging through the host."""
