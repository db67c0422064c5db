"""Collectives in a buffer of so many numbers; at the end it says which way they went. Run under MPI."""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

from hpctrain.comm.mpi import MpiGroup

group = MpiGroup(MPI.COMM_WORLD, timeout_seconds=60)
for _ in range(2):
    x = group.buffer(int(sys.argv[1]), torch.float32)
    x.fill_(group.rank + 1)  # touches every page: one that is not there would end the process here
    group.all_reduce(x)
    assert (x == sum(range(1, group.size + 1))).all()
    piece = torch.empty(x.numel() // group.size)
    group.reduce_scatter(piece, x)
    group.all_gather(x, piece)
    assert (x == group.size * sum(range(1, group.size + 1))).all()
print(type(group._transport).__name__)
group.close()
