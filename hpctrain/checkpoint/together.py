"""What all ranks meet together while they save or load: an error of one is a CheckpointError of all."""

from functools import partial

from hpctrain.comm import together as comm
from hpctrain.errors import CheckpointError

led = partial(comm.led, kind=CheckpointError)
together = partial(comm.together, kind=CheckpointError)
