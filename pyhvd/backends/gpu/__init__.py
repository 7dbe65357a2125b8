"""Run agreed collectives on arrays in GPU memory: by NCCL, or staged through host memory."""
