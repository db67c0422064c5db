"""How fast a run is: seconds by phase, tokens/s, model FLOP/s and its part of the peak, and peak memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PHASES = ("data", "forward", "backward", "communication", "optimizer")


@dataclass(frozen=True)
class Reading:
    """One step's figures. Seconds are this rank's own; tokens are those of all ranks."""

    seconds: float
    phases: dict[str, float]
    tokens: int
    flops: float
    peak_flops: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak of all ranks together."""
        return self.flops / self.seconds / self.peak_flops if self.peak_flops else 0.0


class Meter:
    """A stopwatch with a hand for each phase of a step; live.

    On a GPU the host runs ahead of the device, so a phase is taken between two device events, read at the step's end.
    """

    def __init__(self, device: torch.device, flops_per_token: float, peak_flops: float) -> None:
        self.device, self.flops_per_token, self.peak_flops = device, flops_per_token, peak_flops
        self._spans: list[tuple[str, object, object]] = []
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside as part of ``name``."""
        begin = self._now()
        yield
        self._spans.append((name, begin, self._now()))

    def read(self, tokens: int) -> Reading:
        """The figures of the step that ends here, with ``tokens`` over all ranks; the next one begins."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        phases = dict.fromkeys(PHASES, 0.0)
        for name, begin, end in self._spans:
            phases[name] += _between(begin, end)
        self._spans.clear()
        began, self._began = self._began, time.perf_counter()
        return Reading(self._began - began, phases, tokens, tokens * self.flops_per_token, self.peak_flops)

    def restart(self) -> None:
        """Leave out what happened since the last reading."""
        self._spans.clear()
        self._began = time.perf_counter()

    def _now(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory_bytes(device: torch.device) -> dict[str, int]:
    """The most memory that this process has held so far: ``host`` resident, and ``device`` allocated on a GPU."""
    held = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        held["device"] = torch.cuda.max_memory_allocated(device)
    return held


def measured_peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """The best FLOP/s of one square matrix product in ``dtype``, tried for about ``seconds``."""
    size = 4096 if device.type == "cuda" else 512
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _between(begin: object, end: object) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
