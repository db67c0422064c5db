"""The sections of a configuration: every knob of a run, as frozen values with a docstring each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hpctrain.config.job import JobConfig
from hpctrain.config.model import ModelConfig
from hpctrain.config.section import Auto, Section
from hpctrain.errors import ConfigError


class RunConfig(Section):
    """What this run is called, where its files go, and the number that all its randomness comes from."""

    name: str = "run"
    """A name for logs and for the scheduler's queue."""
    dir: str = "runs/{name}"
    """The folder of the run: log, checkpoints, trace. ``{name}`` stands for the run's name."""
    stop_signals: tuple[str, ...] = Field(("TERM", "USR1", "USR2"), strict=False)
    """Signals at which the run saves and stops, to be started again (exit status 75)."""
    deadline: str = Field("auto", pattern=r"^(auto|none|(\d+-)?\d+:[0-5]\d:[0-5]\d)$")
    """When the run saves and stops by itself: before the end of its job's time, as the batch system says (``auto``);
    also so long after its start, as ``1:30:00`` or ``2-00:00:00``; or not at all (``none``)."""
    margin_seconds: float = Field(30.0, ge=0)
    """What is kept free before that end, beside the time of one more step and of a save."""
    ask_seconds: float = Field(60.0, gt=0)
    """How often the batch system is asked when the job ends: the limit may be moved while it runs."""
    seed: int = 1
    """Initial weights, the order of the data and dropout are pure functions of this number and of the step."""

    @property
    def folder(self) -> Path:
        """The run's folder with its name filled in."""
        return Path(self.dir.replace("{name}", self.name))


class SourceConfig(Section):
    """One token file in the blend."""

    path: str
    """Prefix of a ``.bin``/``.idx`` pair, as ``hpctrain data prepare`` or Megatron-LM write it."""
    weight: float = Field(1.0, gt=0)
    """Its share of the samples, relative to the other sources."""


class DataConfig(Section):
    """What is read."""

    sources: tuple[SourceConfig, ...] = Field((), strict=False)
    """Token files and their weights; with ``text`` and without ``sources`` the text is prepared into the run's data."""
    text: tuple[str, ...] = Field((), strict=False)
    """Text files, folders or JSONL to prepare when there are no sources. ``{stdlib}`` stands for the folder of the
    Python standard library."""
    pattern: str = "*.txt"
    """Which files of a folder in ``text`` are read."""
    tokenizer: str = "bytes"
    """``bytes``, ``bpe:N`` (a byte-pair encoding of N tokens trained on the text), or a Hugging Face tokenizer JSON."""
    validation: float = Field(0.05, ge=0.0, lt=1.0)
    """Part of the samples kept for validation."""
    cross_documents: bool = True
    """Whether attention may look across the border between two documents packed in one sample."""


class TrainConfig(Section):
    """How long and with how much at once."""

    steps: int = Field(100, ge=0)
    """Optimizer updates in the whole run."""
    batch: int = Field(32, ge=1)
    """Sequences in one step, over all ranks and micro-batches."""
    microbatch: int = Field(4, ge=1)
    """Sequences that a rank takes through the model at once; the rest is accumulated."""
    recompute: str = Field("none", pattern=r"^(none|selective|full|offload|every:[1-9][0-9]*)$")
    """What of the forward is made again in the backward instead of kept: ``none``, ``selective`` (attention without its
    linear maps), ``every:K`` (each K-th block) or ``full`` (each block). ``offload`` keeps it in the host's memory."""
    smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Part of each target's probability that is spread over all tokens alike; in training, not in validation."""
    z_loss: float = Field(0.0, ge=0.0)
    """What the squared logarithm of the softmax's denominator adds to the loss, times this; in training alone."""
    validate_every: int = Field(0, ge=0)
    """Steps between two validations; 0 for none."""
    validate_batches: int = Field(4, ge=1)
    """Batches in one validation."""


class PrecisionConfig(Section):
    """The number formats."""

    compute: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    """Format of weights and activations where they multiply. Under bf16 and fp16 the optimizer updates fp32 masters
    of the weights, and gradients are summed in fp32. fp64 is for proofs of equality."""
    gradients: Literal["wide", "compute"] = "wide"
    """Format in which gradients are summed, over micro-batches and ranks, and travel: ``wide`` is fp32 under 16-bit
    formats, ``compute`` is that of ``precision.compute``: half the bytes, and each sum rounded."""
    fp8: Literal["none", "tensor", "block"] = "none"
    """Products of the blocks' linear maps in fp8: e4m3 forward, e5m2 for gradients. ``tensor`` has one scale a tensor,
    ``block`` one for 1 x 128 activations and for 128 x 128 weights."""
    scale: float = Field(65536.0, gt=0)
    """The first loss scale under fp16."""
    scale_interval: int = Field(1000, ge=1)
    """Steps without an overflow that double the loss scale; an overflow halves it and leaves its step out."""
    scale_floor: float = Field(1.0, gt=0)
    """The smallest loss scale; an overflow at it ends the run."""

    @model_validator(mode="after")
    def _sums_hold_small_gradients(self) -> PrecisionConfig:
        if self.gradients == "compute" and self.compute == "fp16":
            raise ConfigError(
                'precision.gradients = "compute" does not go with precision.compute = "fp16"',
                "without the loss scale, which is taken off before the update, small gradients vanish in fp16",
                'leave precision.gradients out, or set precision.compute to "bf16"',
            )
        return self


class OptimConfig(Section):
    """The optimizer and its rate."""

    kind: Literal["adamw", "adafactor", "adamw8bit", "muon"] = "adamw"
    """``adamw``: decoupled weight decay. ``adafactor``: squares kept as a row and a column of each matrix.
    ``adamw8bit``: running means in 8 bits. ``muon``: steps of equal size in all directions for the matrices of hidden
    layers, AdamW for the rest."""
    rate: float = Field(3e-4, gt=0)
    """The highest learning rate; ``adafactor`` takes it as a part of a parameter's own size."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    decay: float = Field(0.1, ge=0)
    """Weight decay of matrices; vectors (biases, norms) have none."""
    states: Literal["fp32", "bf16"] = "fp32"
    """Format in which ``adamw`` keeps its running means; ``bf16`` halves them, by stochastic rounding."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the gradient's running mean where ``muon`` steps with equal size."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Steps of ``muon``'s iteration (Newton-Schulz) that makes a matrix orthogonal."""
    muon_except: tuple[str, ...] = Field(
        ("embed*", "*.embed*", "head*", "*.head*", "*lm_head*", "*wte*", "*wpe*"), strict=False
    )
    """Names of matrices that ``muon`` leaves to AdamW, ``*`` standing for anything: what is looked up in, and what
    gives the logits. Parameters of other than two dims are left to it too."""
    clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 for no clipping."""
    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Course of the rate after the warm-up: held, straight down, half a cosine, or held and then straight down."""
    warmup: int = Field(10, ge=0)
    """Steps over which the rate rises from nothing."""
    floor: float = Field(0.1, ge=0, le=1)
    """The last rate, as a part of the highest."""
    cooldown: float = Field(0.2, gt=0, le=1)
    """Part of the steps that ``wsd`` spends going down."""

    @model_validator(mode="after")
    def _states_fit_the_kind(self) -> OptimConfig:
        if self.states != "fp32" and self.kind != "adamw":
            raise ConfigError(
                f'optim.states = "{self.states}" does not go with optim.kind = "{self.kind}"',
                "only adamw keeps its running means in another format",
                'leave optim.states out, or set optim.kind to "adamw"',
            )
        return self


class ParallelConfig(Section):
    """How the work is cut over the ranks."""

    dp: int | Auto = "auto"
    """Ranks that take different samples; ``auto`` uses all."""
    tp: int = Field(1, ge=1)
    """Ranks that share every product of a micro-batch (tensor parallelism): neighbours, best of one node."""
    sequence: bool = True
    """Whether ranks along ``tp`` share the tokens between products too: norms, dropout and residuals."""
    pp: int = Field(1, ge=1)
    """Ranks that have different blocks (pipeline parallelism)."""
    placement: Literal["auto", "given"] = "auto"
    """Which rank is where in the mesh: ``auto`` puts those that send each other most near each other, ``given`` takes
    ranks as the launcher numbered them, those along ``tp`` in a row."""
    schedule: str = "1f1b"
    """What each rank along ``pp`` does when: ``gpipe``, ``1f1b``, ``interleaved``, ``looped-bfs``, ``zb-h1``,
    ``zb-h2``, ``zb-v`` or ``dualpipe-v``; ``hpctrain draw`` shows them."""
    chunks: int | None = Field(None, ge=1)
    """Stages of each rank along ``pp``; 2 where the schedule can have several, else 1, when not given."""
    group: int | None = Field(None, ge=1)
    """Micro-batches that go through a stage of ``interleaved`` before the next one has its turn, ``pp`` when not
    given."""
    layers_per_stage: tuple[int, ...] | None = Field(None, strict=False)
    """Blocks of each stage, in order; dealt out evenly when not given, the head counting as what it costs."""
    zero: Literal[0, 1, 2, 3] = 0
    """What ranks share instead of each having it all: ``0`` nothing, ``1`` the optimizer's states, ``2`` gradients too,
    ``3`` weights too."""
    shard: int | None = Field(None, ge=1)
    """Ranks that share one copy, under ``zero`` 1 to 3: so many neighbours, and each such group has a replica; all
    ranks when not given."""
    gather_mib: float | Auto = "auto"
    """Weights of blocks alive at once under ``zero = 3``, in MiB, as far as one block fits; ``auto`` is twice the
    largest block: one in use and one on its way."""
    near: int | None = Field(None, ge=1)
    """Under ``zero = 3``, so many neighbours keep a second copy of the weights among them between a step's first gather
    and its end, so that all others stay among neighbours; best the ranks of a node. None keeps no second copy."""
    gather_in: Literal["exact", "int8", "fp8"] = "exact"
    """Format in which weights travel under ``zero = 3``: their own, or 8 bits and a scale for each 256."""
    reduce_in: Literal["exact", "int8", "fp8"] = "exact"
    """Likewise gradients, under ``zero`` 1 to 3; with ``near`` they are added up among neighbours first."""

    @model_validator(mode="after")
    def _travels_what_is_shared(self) -> ParallelConfig:
        for key, least, why in (
            ("near", 3, "only weights that ranks share are gathered again and again"),
            ("gather_in", 3, "only weights that ranks share come and go"),
            ("reduce_in", 1, "where ranks share nothing, gradients have no owner to travel to"),
        ):
            if getattr(self, key) not in (None, "exact") and self.zero < least:
                mend = f"set parallel.zero to {' or '.join(map(str, range(least, 4)))}, or leave parallel.{key} out"
                raise ConfigError(
                    f"parallel.{key} = {getattr(self, key)!r} with parallel.zero = {self.zero}", why, mend
                )
        return self


class CheckpointConfig(Section):
    """What is saved, when and how."""

    every: int = Field(0, ge=0)
    """Steps between two saves; 0 for only the last one."""
    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints stay."""
    keep_every: int = Field(0, ge=0)
    """Those of every so many steps stay for good; 0 for none."""
    keep_hours: float = Field(0.0, ge=0)
    """One stays for good every so many hours; 0 for none."""
    on_full: Literal["stop", "go on"] = "stop"
    """On a full disk ``stop`` ends the run; ``go on`` warns, and the next save tries again. The last save stops."""
    verify: bool = True
    """Whether what is loaded is checked against its checksums; a damaged checkpoint is passed over for an older one."""
    start_from: str | None = None
    """A checkpoint, or a folder with some, or a run's, that a new run starts from, at step 0; for instance an imported
    one. Once the run has a checkpoint of its own, it goes on from that."""
    only: tuple[str, ...] = Field(("model/*",), strict=False)
    """Which tensors are taken from ``start_from``, as shell patterns; ``["*"]`` takes the optimizer's too."""
    rename: dict[str, str] = {}
    """Names in ``start_from`` and what they are called here; a ``*`` on each side stands for the same text."""
    near: str | None = None
    """A folder on each node's own disk or in its memory (``/dev/shm``), for checkpoints between those in the run's
    folder. Variables such as ``$SLURM_TMPDIR`` are filled in on each node, ``{host}`` with its name."""
    near_every: int = Field(0, ge=0)
    """Steps between two saves to ``near``; 0 for none."""
    near_copies: int = Field(2, ge=1, le=2)
    """2: the next node has a copy of what each node saves to ``near``, so one node may be lost. 1: none has."""
    writer: Literal["auto", "mpio", "direct"] = "auto"
    """``mpio``: writes through parallel HDF5. ``direct``: each rank writes its byte ranges. The bytes are equal;
    ``auto`` takes ``direct``, which needs no parallel HDF5."""
    background: bool = True
    """Whether a run trains on while a save goes to the disk. It stands still only while each rank copies what it writes
    to host memory, and keeps that memory; where there is too little, and with ``mpio``, the run waits for each save."""
    sync: bool = True
    """Whether a save ends only when the disk has the bytes (fsync)."""
    hints: dict[str, str | int] = {}
    """Hints that the ``mpio`` writer gives to MPI-IO, e.g. ``striping_factor``; each MPI library knows its own. The
    file of ``job.machine`` fills in those that are left out."""

    @model_validator(mode="after")
    def _near_has_a_folder(self) -> CheckpointConfig:
        if self.near_every and self.near is None:
            what = f"checkpoint.near_every = {self.near_every}, and there is no folder to save to"
            why = "such a checkpoint lies on the nodes' own disks, or in their memory"
            raise ConfigError(what, why, 'set checkpoint.near, for instance to "/dev/shm", or near_every to 0')
        return self


class CommConfig(Section):
    """How ranks talk."""

    backend: Literal["auto", "mpi", "gloo", "nccl", "xccl"] = "auto"
    """``auto``: NCCL where each rank has a GPU of NVIDIA or AMD, xccl where each has one of Intel, else MPI."""
    timeout_seconds: float = Field(600.0, gt=0)
    """How long a collective waits for the slowest rank before the job is ended with the names of who is missing."""
    start_seconds: float = Field(300.0, gt=0)
    """How long the ranks wait for each other at start-up."""
    check_master_addr: bool = True
    """Whether a MASTER_ADDR in the environment that is not the node of rank 0 is refused."""


class LogConfig(Section):
    """What is told while it runs."""

    every: int = Field(1, ge=1)
    """Steps between two lines."""
    tensorboard: bool = False
    """Whether scalars also go to TensorBoard event files (needs the package tensorboard)."""
    peak_tflops: float | Auto = "auto"
    """Peak TFLOP/s of one rank, for MFU; ``auto`` measures a matrix product at start."""
    trace: tuple[int, ...] = Field((), strict=False)
    """Steps, counted from 1, of which it is recorded when each action of the pipeline ran: ``trace-STEP.json`` in the
    run's folder, for https://ui.perfetto.dev, and the bubble in the log."""

    @model_validator(mode="after")
    def _traces_steps_that_there_are(self) -> LogConfig:
        if min(self.trace, default=1) < 1:
            what = f"log.trace = {list(self.trace)}: no step has the number {min(self.trace)}"
            raise ConfigError(what, "steps are counted from 1, as in the log", "set log.trace to [10], for one")
        return self


class Config(Section):
    """Everything that a person chose for one run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    comm: CommConfig = CommConfig()
    log: LogConfig = LogConfig()
    job: JobConfig = JobConfig()
