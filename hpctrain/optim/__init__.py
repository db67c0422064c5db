"""Optimizers, clipping and the course of the learning rate."""
