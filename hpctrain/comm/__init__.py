"""Talk: collectives over MPI, NCCL, gloo, or nobody."""
