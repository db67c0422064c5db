"""Checkpoints: one HDF5 file of global tensors."""
