"""The stopwatch of a step. Times are compared with each other, never with a clock's."""

from __future__ import annotations

import time

import pytest
import torch

from hpctrain.watch.meter import PHASES, Meter, Reading, measured_peak_flops, peak_memory_bytes

CPU = torch.device("cpu")


def test_what_is_inside_a_phase_counts_for_it_and_adds_up() -> None:
    meter = Meter(CPU, flops_per_token=1.0, peak_flops=1.0)
    for name in ("forward", "backward", "forward"):
        with meter.phase(name):
            time.sleep(0.002)
    reading = meter.read(tokens=1)
    assert tuple(reading.phases) == PHASES
    assert reading.phases["forward"] >= 0.004 and reading.phases["backward"] >= 0.002
    assert [reading.phases[name] for name in ("data", "communication", "optimizer")] == [0.0, 0.0, 0.0]
    assert sum(reading.phases.values()) <= reading.seconds


def test_a_reading_begins_the_next_step() -> None:
    meter = Meter(CPU, 1.0, 1.0)
    with meter.phase("data"):
        time.sleep(0.02)
    first = meter.read(1)
    second = meter.read(1)
    assert second.phases["data"] == 0.0
    assert second.seconds < first.seconds


def test_a_restart_leaves_out_what_was_before() -> None:
    meter = Meter(CPU, 1.0, 1.0)
    with meter.phase("data"):
        time.sleep(0.02)
    meter.restart()
    reading = meter.read(1)
    assert reading.phases["data"] == 0.0 and reading.seconds < 0.02


def test_a_phase_that_raises_lets_the_error_through() -> None:
    meter = Meter(CPU, 1.0, 1.0)
    with pytest.raises(KeyError), meter.phase("data"):
        raise KeyError


def test_rates_are_per_second_and_mfu_is_of_the_peak() -> None:
    reading = Reading(seconds=2.0, phases={}, tokens=100, flops=500.0, peak_flops=1000.0)
    assert reading.tokens_per_second == 50.0
    assert reading.mfu == 0.25
    assert Reading(2.0, {}, 100, 500.0, 0.0).mfu == 0.0


def test_the_flops_of_a_step_are_those_of_its_tokens() -> None:
    assert Meter(CPU, flops_per_token=6.0, peak_flops=1.0).read(tokens=7).flops == 42.0


def test_the_peak_is_measured_in_the_asked_for_format() -> None:
    assert measured_peak_flops(CPU, torch.float32, seconds=0.0) > 1e6
    assert measured_peak_flops(CPU, torch.float64, seconds=0.0) > 1e6


def test_the_peak_of_memory_never_falls_and_takes_in_what_was_freed() -> None:
    before = peak_memory_bytes(CPU)["host"]
    block = torch.ones(8 * 2**20)
    held = peak_memory_bytes(CPU)["host"]
    del block
    assert before <= held <= peak_memory_bytes(CPU)["host"]
    assert held > 32 * 2**20
