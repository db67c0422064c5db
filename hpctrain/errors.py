"""Every error that a user can meet, as one tree.

    HpctrainError                exit 1   anything that stops a run
    ├── UsageError               exit 2   wrong use: a command, a file or a value that cannot be
    │   ├── ConfigError                   a key of the configuration
    │   ├── PlanError                     a mesh, a layout or a schedule that does not fit
    │   └── LaunchError                   ranks that were started in a way that cannot work
    ├── NodesError                        nodes of the job that cannot train
    ├── DivergedError                     a gradient that is no number, on all ranks at once
    ├── ShapeError                        tensors that do not fit each other
    ├── CommError                         a collective that failed
    │   └── LateError                     a rank that did not come in time
    ├── QueueError                        Slurm refused something, or did not answer
    ├── DataError                         text, tokens or their files
    └── CheckpointError                   a checkpoint that cannot be written or read
        ├── IncompleteError               a file whose writing did not end
        ├── DamagedError                  a file whose bytes are not those that were written
        └── FullError                     a disk with too little room

A message has three parts, a line each: what happened (with the key and the value), why, and how to mend it.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: stopped in good order, start me again


class HpctrainError(Exception):
    """An error told as what happened, why, and how to mend it."""

    exit_code = EXIT_FAILED

    def __init__(self, what: str, why: str = "", mend: str = "") -> None:
        super().__init__(what, why, mend)
        self.what, self.why, self.mend = what, why, mend

    def __str__(self) -> str:
        return "\n  ".join(part for part in (self.what, self.why, self.mend) if part)


class UsageError(HpctrainError):
    """The command was used in a way that it cannot serve."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A key of the configuration is unknown, missing, or has a value that cannot be."""


class PlanError(UsageError):
    """A mesh, a layout or a schedule does not fit the ranks or the model."""


class LaunchError(UsageError):
    """The ranks were started in a way that cannot work."""


class NodesError(HpctrainError):
    """Too few of the job's nodes can train."""


class DivergedError(HpctrainError):
    """A step whose gradient is no number. All ranks meet it together, so they can still end in good order."""


class ShapeError(HpctrainError):
    """Tensors do not fit each other in shape, dtype or place."""


class CommError(HpctrainError):
    """A collective could not be done."""


class LateError(CommError):
    """A rank did not come to a collective in time."""


class QueueError(HpctrainError):
    """Slurm refused what was asked of it, or did not answer in time."""


class DataError(HpctrainError):
    """Text, tokens or their files cannot be used."""


class CheckpointError(HpctrainError):
    """A checkpoint cannot be written or read."""


class IncompleteError(CheckpointError):
    """A checkpoint file whose writing did not come to its end."""


class DamagedError(CheckpointError):
    """A checkpoint file whose bytes are not those that were written."""


class FullError(CheckpointError):
    """A disk, or a quota, that has too little room for a checkpoint."""
