"""MpiGroup keeps every promise of a group."""

from __future__ import annotations

import pytest

from hpctrain.comm.mpi import MpiGroup
from tests.contract.group import GroupContract

pytestmark = pytest.mark.mpi(min_size=4)


class TestMpiGroup(GroupContract):
    @classmethod
    def open(cls, comm):
        return MpiGroup(comm)
