"""Move messages and bytes over MPI, through mpi4py; only init() imports this package."""
