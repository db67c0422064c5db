"""Tests in which several MPI ranks take part: one verdict for all ranks, and no test that hangs."""
