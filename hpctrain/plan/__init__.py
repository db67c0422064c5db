"""Decide: every choice as a value, without torch or MPI."""
