"""What torch, Linux and NVML say of real devices fits together."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from hpctrain.cluster import cores
from hpctrain.cluster.devices import bind_cores, pci, visible_devices
from hpctrain.cluster.sysfs import SYS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")]


def test_every_device_has_a_name_and_a_place_on_the_bus() -> None:
    devices = visible_devices()
    assert devices.kind == "cuda" and len(set(devices.ids)) == torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        address = pci(torch.cuda.get_device_properties(index))
        assert address and (SYS / "bus/pci/devices" / address).exists()
    assert len(devices.near) == len(devices.fabrics) == len(devices.ids)


def test_a_rank_computes_on_cores_near_its_device_once_it_is_bound() -> None:
    before = os.sched_getaffinity(0)
    own = cores.usable_cores()
    topology = SimpleNamespace(ranks_of=lambda node: (0,))
    world = SimpleNamespace(
        collect=lambda value: [value], topology=topology, node=0, local_rank=0, cores=own, cores_of_node=(own,)
    )
    near = visible_devices().near[0].cores & own
    try:
        bind_cores(world, "cuda:0")
        assert cores.usable_cores() == world.cores == (near or own)
    finally:
        os.sched_setaffinity(0, before)
