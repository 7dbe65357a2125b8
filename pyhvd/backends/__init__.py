"""Run agreed collectives: the algorithms for arrays in host memory, over any fabric, and on GPUs."""
