"""The story of one run, top to bottom: read this first."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.keep import FOLDER
from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.state import Held, State, dtype_name
from hpctrain.cluster.cores import threads
from hpctrain.cluster.devices import bind_cores, by_fabric, choose_device
from hpctrain.cluster.slurm import life
from hpctrain.cluster.stop import Stop
from hpctrain.cluster.world import World
from hpctrain.comm.group import Group
from hpctrain.comm.groups import Groups
from hpctrain.comm.together import led
from hpctrain.config import Config
from hpctrain.data.batch import Batches
from hpctrain.data.prepare import ready
from hpctrain.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError, DivergedError
from hpctrain.model.init import filler, hollow
from hpctrain.model.transformer import Transformer
from hpctrain.optim.clip import global_norm, scale_
from hpctrain.optim.optimizers import Optimizers
from hpctrain.optim.rate import rate
from hpctrain.parallel.assemble import counted, everyone, optimizers, piped, sharers, travelling
from hpctrain.parallel.deferred import split
from hpctrain.parallel.pipeline import Runner
from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.tensor import tensor_parallel
from hpctrain.parallel.zero import Formats, Sharded
from hpctrain.plan.fit import fit, hinted
from hpctrain.plan.formats import Format
from hpctrain.plan.layout import Layout
from hpctrain.plan.links import linked
from hpctrain.plan.machine import Machine
from hpctrain.plan.machines import named
from hpctrain.plan.plan import Plan, decide, lay
from hpctrain.plan.rules import COPY, TENSOR
from hpctrain.plan.topology import Topology
from hpctrain.plan.units import PIPE, REPLICA, SHARD, STAGES
from hpctrain.plan.weights import flops_per_token
from hpctrain.precision.fp8 import in_fp8
from hpctrain.precision.scale import LossScale
from hpctrain.watch import trace
from hpctrain.watch.log import Log
from hpctrain.watch.meter import Meter, measured_peak_flops, peak_memory_bytes


def train(config: Config, world: World, stop: Stop) -> int:
    """Run one training job, from its configuration to its last checkpoint; gives the exit status. All ranks call it.

    When ``stop`` says so it ends early: with a checkpoint, or before the first step with nothing that is not whole.
    """
    site = Site.settle(config, world)  # this rank's device, and the links between ranks
    groups = Groups.open(lay(config, site.topology), world, config.comm)  # a communicator for each axis
    led(groups.whole, lambda: config.run.folder.mkdir(parents=True, exist_ok=True), "making the run's folder")
    batches = open_data(config, groups, stop.heed)  # text becomes tokens, once
    plan = fit(decide(config, site.topology, batches.vocabulary), config, site.machine)  # every decision, as one value
    job = Job.build(config, plan, groups, site.device)  # this rank's part of the model
    knobs, folder = hinted(config.checkpoint, site.machine), config.run.folder / FOLDER
    checkpoint = Checkpoint(knobs, folder, plan.mesh, groups.whole, world.host)
    about = {"plan": plan.to_json(), "config": config.model_dump()}

    stop.heed()  # whoever asks before the first step need not wait for it
    start = checkpoint.resume(job.state)  # the step to go on from; 0 when new
    stop.heed()
    stop.pace.expect(checkpoint.nbytes, len(world.topology.nodes))
    with (
        open_log(config, start, world) as log,
        Saver(checkpoint, job.state, about, log.say, stop.pace) as saver,
    ):
        log.say(greeting(config, plan, start, os.environ))
        if checkpoint.resumed_near and start >= config.train.steps:
            saver.step(start, last=True)  # no step is left to do, and the run's folder has no file of this one
        ends = False
        for step in range(start, config.train.steps):
            told = job.step(step, batches, stop.agreed)
            stop.pace.stepped(told["seconds"])

            ends = stop.agreed() and step + 1 < config.train.steps  # all ranks stop at the same step
            try:
                told |= saver.step(step + 1, last=ends or step + 1 == config.train.steps)  # goes on in the background
            finally:
                log.step(step + 1, told)  # also when its save fails
            if ends:
                break
    newest = checkpoint.newest()
    log.say(parting(step + 1, stop.why) if ends else farewell(config, newest, max(start, config.train.steps)))
    groups.close()
    return EXIT_REQUEUE if ends else EXIT_DONE


@dataclass(frozen=True)
class Site:
    """Where a run takes place: a machine's facts, where one is named, this rank's device, and what joins the ranks."""

    machine: Machine | None
    device: torch.device
    topology: Topology

    @classmethod
    def settle(cls, config: Config, world: World) -> Site:
        """Take this rank's device, the cores near it, and as many threads as it has cores to itself. Collective."""
        machine = named(config.job.machine)
        seats = machine.node.seats if machine else ()
        device = torch.device(choose_device(world, seats))
        if config.job.bind_cores:
            bind_cores(world, str(device), seats)
        torch.set_num_threads(threads(world))
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)  # NCCL's groups are opened on the current one
        return cls(machine, device, linked(by_fabric(world, str(device)), machine))


@dataclass(frozen=True)
class Job:
    """The live parts of a run on this rank: they change, their places do not."""

    config: Config
    plan: Plan
    sharded: Sharded
    optimizer: Optimizers
    owners: Group
    """The ranks that own different parts of the model."""
    counted: tuple[Tensor, ...]
    """This rank's gradients that count in the norm over the owners."""
    runner: Runner
    meter: Meter
    scale: LossScale
    state: State
    """Every tensor that a checkpoint keeps, by its name there."""

    @classmethod
    def build(cls, config: Config, plan: Plan, groups: Groups, device: torch.device) -> Job:
        """Make this rank's part of a run, with the weights of step 0. All ranks of the groups call it."""
        format = Format.of(config.precision)
        dtype, compute, summed = (getattr(torch, name) for name in (format.master, format.compute, format.summed))
        spans = plan.spans_of(groups[PIPE].rank)
        model = hollow(lambda: Transformer(plan.shape, spans), dtype, device)
        tensor_parallel(model, groups[TENSOR], config.parallel.sequence, groups[COPY])
        recompute(model, config.train.recompute)
        in_fp8(model.blocks, config.precision.fp8)
        pipe = piped(config, plan, groups, split(plan.schedule, model))
        fill = filler(plan.shape, config.run.seed)
        formats = Formats(compute, summed, *travelling(config.parallel))
        sharded = Sharded(
            model, plan.units[groups[PIPE].rank], STAGES[plan.zero], sharers(config, plan, groups), formats,
            plan.gather_bytes, fill, lambda slot: slot.box(plan.mesh, groups.rank),
        )  # fmt: skip
        optimizer = optimizers(sharded, config, plan, groups)
        meter = Meter(device, flops_per_token(plan.shape), groups.whole.size * peak_flops(config, device, compute))
        runner = Runner(plan.schedule, model, sharded, groups[REPLICA, SHARD], meter, config.run.seed, pipe)
        scale = LossScale(config.precision)
        state = {name: Held(*kept) for name, kept in sharded.state(optimizer).items()}
        state |= {f"optim/{name}": Held(Layout(tuple(x.shape), dtype_name(x)), x) for name, x in scale.states().items()}
        owners, own = groups[everyone(plan)], tuple(counted(sharded, plan, groups))
        return cls(config, plan, sharded, optimizer, owners, own, runner, meter, scale, state)

    def step(self, step: int, batches: Batches, stops: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Take one optimizer step and say how it went; ``step`` counts the steps before it. Collective.

        A validation after it is given up when all ranks agree in ``stops``.
        """
        optim, group, device = self.config.optim, self.runner.group, self.meter.device
        self.meter.restart()  # what was between the steps, such as a save, is no part of either
        with self.meter.phase("data"):
            microbatches = [m.to(device) for m in batches.part(step, group.rank, group.size)]
        scale, recorder = self.scale.told(), self.recorder(step + 1)
        loss, tokens = self.runner.run(microbatches, step, self.scale.value, recorder)
        with self.meter.phase("optimizer"):
            gradients = [flat.gradient for flat in self.sharded.flats()]
            self.scale.undo(gradients)
            norm, now = global_norm(self.counted, self.owners), rate(optim, step, self.config.train.steps)
            if not self.scale.skips(norm):
                scale_(gradients, finite(norm, loss, step + 1), optim.clip)
                self.optimizer.update(now, step)
        reading = self.meter.read(tokens)
        return {
            "loss": loss,
            "norm": norm if math.isfinite(norm) else None,
            "rate": now,
            "tokens": tokens,
            "seconds": reading.seconds,
            "tokens_per_second": reading.tokens_per_second,
            "flops_per_second": reading.flops / reading.seconds,
            "mfu": reading.mfu,
            "phases": reading.phases,
            "peak_bytes": peak_memory_bytes(device),
            **scale,
            **self.traced(step + 1, recorder),
            **self.validation(step + 1, batches, stops),
        }

    def recorder(self, step: int) -> trace.Untraced:
        """What records the actions of step ``step``, counted from 1, if they are to be."""
        return trace.Trace(self.meter.device) if step in self.config.log.trace else trace.UNTRACED

    def traced(self, step: int, recorder: trace.Untraced) -> dict[str, float]:
        """The bubble of the first pipeline in a traced step, whose file it also writes. Collective."""
        timeline = recorder.timeline(self.plan.schedule, self.runner.pipe.group.collect)
        if timeline is None:
            return {}
        if self.owners.leads and self.runner.group.leads:
            trace.write(self.config.run.folder / f"trace-{step}.json", timeline)
        return trace.bubbles(timeline)

    def validation(self, step: int, batches: Batches, stops: Callable[[], bool]) -> dict[str, float]:
        """The validation loss after ``step`` steps, when it is due and the run does not stop meanwhile. Collective."""
        every, group = self.config.train.validate_every, self.runner.group
        if not every or step % every:
            return {}
        count = min(self.config.train.validate_batches, batches.validation_batches)
        loss, tokens = 0.0, 0
        for index in range(count):
            if stops():
                return {}
            part = [m.to(self.meter.device) for m in batches.validation(index, group.rank, group.size)]
            loss, tokens = (sum(pair) for pair in zip((loss, tokens), self.runner.price(part), strict=True))
        return {"validation_loss": loss / max(tokens, 1)}


def finite(norm: float, loss: float, step: int) -> float:
    """The norm of a step's gradients, where an update by them makes sense; the same on all ranks."""
    if math.isfinite(norm):
        return norm
    raise DivergedError(
        f"the gradient of step {step} has the norm {norm}, at a loss of {loss:.4g}",
        "an update would have destroyed the weights; none was made, and the last checkpoint is whole",
        "lower optim.rate, raise optim.warmup, or look at what data the step met",
    )


def open_data(config: Config, groups: Groups, heed: Callable[[], None] = lambda: None) -> Batches:
    """The run's samples, made from its text where it names no token files, unless ``heed`` raises. Collective."""
    sources = ready(config.data, config.run.folder / "data", groups.whole, heed=heed)
    data = config.data.model_copy(update={"sources": sources})
    vocabulary = None if config.model.vocabulary == "auto" else config.model.vocabulary
    batches = Batches(data, config.train, config.model.sequence, config.run.seed, vocabulary)
    if config.train.validate_every and not batches.validation_batches:
        what = f"train.validate_every = {config.train.validate_every}, and there is no sample to validate with"
        why = f"data.validation = {data.validation} of the tokens are less than {config.model.sequence} for one sample"
        raise ConfigError(what, why, "set data.validation higher, or train.validate_every to 0")
    return batches


def peak_flops(config: Config, device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one rank, as given or measured."""
    given = config.log.peak_tflops
    return measured_peak_flops(device, dtype) if given == "auto" else given * 1e12


def open_log(config: Config, start: int, world: World) -> Log:
    """The run's record; only the leading rank writes one."""
    log = config.log
    return Log(config.run.folder, start, config.train.steps, world.leads, log.every, log.tensorboard)


def greeting(config: Config, plan: Plan, start: int, environ: Mapping[str, str]) -> str:
    """How a run begins, or one more life of it."""
    which = [life(environ)] if life(environ) else []
    if start:
        return ", ".join([*which, f"going on from step {start}"])
    source = config.checkpoint.start_from
    lines = [f"{one}, from the beginning" for one in which] + [plan.show()]
    return "\n".join(lines if source is None else [*lines, f"starting from {source}"])


def parting(step: int, why: str | None) -> str:
    """What happened to a run that was stopped."""
    return f"stopped after step {step}: {why}; start the same command again to go on"


def farewell(config: Config, newest: Path | None, step: int) -> str:
    """What was made and what to try next, in two lines."""
    if newest is None:
        return "made nothing: train.steps = 0\ntry: --set train.steps=100"
    return (
        f"made {newest}: step {step} of {config.run.name}, its log in {config.run.folder}/log.jsonl\n"
        f"try: hpctrain ckpt inspect {newest}, or train on with --set train.steps={2 * step}"
    )
