"""A group of one keeps every promise of a group."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.group import SoloGroup
from hpctrain.errors import CommError
from tests.contract.group import GroupContract


class TestSoloGroup(GroupContract):
    sizes = (1,)

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls):
        return SoloGroup()


def test_a_message_that_was_never_sent_is_refused():
    with pytest.raises(CommError, match="nothing was sent with tag 3"):
        SoloGroup().recv(torch.zeros(1), 0, tag=3)
