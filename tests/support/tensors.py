"""Models that ranks share, and what one rank makes of the same: for threads and for MPI alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.config import ModelConfig
from hpctrain.model.init import initialise
from hpctrain.model.loss import IGNORE
from hpctrain.model.noise import Noise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.tensor import tensor_parallel
from hpctrain.plan import rules
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.weights import ModelShape
from hpctrain.precision.fp8 import in_fp8
from tests.support.threads import Room, ThreadGroup
from tests.support.threads import run as run_threads

VOCABULARY = 51  # odd: its pieces differ
Answers = dict[str, Tensor]  # the loss, the logits and each weight's gradient


@dataclass(frozen=True)
class Case:
    """A model, and how it is run."""

    knobs: dict[str, Any] = field(default_factory=dict)
    """Of ``ModelConfig``."""
    sequence: bool = True
    documents: bool = False
    terms: dict[str, float] = field(default_factory=dict)
    """Of the loss."""
    recompute: str = "none"
    fp8: str = "none"
    dtype: torch.dtype = torch.float64
    rows: int = 3
    first: bool = False
    """Whether recomputation and fp8 come before the ranks' shares."""

    @property
    def shape(self) -> ModelShape:
        own = dict(layers=2, width=32, heads=4, sequence=7, init_std=0.2) | self.knobs
        return ModelShape.of(ModelConfig(**own), VOCABULARY)

    def whole(self) -> Transformer:
        """The model as one rank has it."""
        model = Transformer(self.shape).to(self.dtype)
        initialise(model, self.shape, seed=1)
        return model

    def more(self, model: Transformer) -> None:
        recompute(model, self.recompute)
        in_fp8(model.blocks, self.fp8)

    def shared(self, group: Group, copies: Group | None = None) -> Transformer:
        """The model as a rank of the group has it. Collective."""
        model = self.whole()
        if self.first:
            self.more(model)
        tensor_parallel(model, group, self.sequence, copies)
        if not self.first:
            self.more(model)
        return model

    def answers(self, model: Transformer) -> Answers:
        """What the model makes of some tokens. Collective, where it is shared."""
        make = torch.Generator().manual_seed(5)
        tokens = torch.randint(VOCABULARY, (self.rows, self.shape.sequence), generator=make)
        targets, documents = tokens.roll(-1, 1).clone(), torch.arange(self.shape.sequence).div(3).long()
        targets[:, -1] = IGNORE
        documents = documents.expand_as(tokens) if self.documents else None
        own = model.head.loss
        model.head.loss = lambda *given: own(*given, **self.terms)
        loss, count = model.loss(tokens, targets, documents, Noise(1, 2, tuple(range(4, 4 + self.rows))), balanced=True)
        model.head.loss = own
        loss.backward()
        with torch.no_grad():
            found = {"loss": loss.detach(), "count": count, "logits": model(tokens, documents)}
        return found | {name: parameter.grad for name, parameter in model.named_parameters()}

    def alone(self) -> Answers:
        """What one rank answers."""
        model = self.whole()
        self.more(model)
        return self.answers(model)

    def wide(self) -> Answers:
        """What one rank answers in fp64, with products of that format."""
        plain = replace(self, dtype=torch.float64, fp8="none")
        return plain.alone()


def boxes(case: Case, ranks: int, rank: int, whole: Answers) -> Answers:
    """The part of one rank's answers that a rank of several should have."""
    mesh, layouts = Mesh(rules.axes(case.shape, ranks)), rules.layouts(case.shape, "float64")
    found = dict(whole)
    for name, layout in layouts.items():
        (box,) = layout.boxes(mesh, rank)
        found[name] = whole[name][box.slices]
    return found


def run(case: Case, ranks: int, act: Callable[[Group, Group], Any], kind: type[ThreadGroup] = ThreadGroup) -> list[Any]:
    """Call ``act`` on each of ``ranks`` threads, with the group of all and that of those with the same head."""
    mesh = Mesh(rules.axes(case.shape, ranks))
    rooms = {members: Room(len(members)) for members in mesh.groups(rules.COPY)}
    everyone = Room(ranks)

    def one(group: ThreadGroup) -> Any:
        members = mesh.ranks(group.rank, rules.COPY)
        return act(kind(everyone, group.rank), kind(rooms[members], members.index(group.rank)))

    return run_threads(ranks, one)


def difference(found: Answers, expected: Answers, whole: Answers) -> float:
    """The largest difference of loss, logits and gradients, each as a part of the largest of all of its kind.

    Gradients are one kind: that of a key's bias is nothing but rounding, as softmax does not see it.
    """
    assert found.keys() == expected.keys() and found["count"] == expected["count"]
    gradients = [name for name in whole if name not in ("loss", "logits", "count")]
    largest = max(float(whole[name].abs().max()) for name in gradients)
    scales = {"loss": float(whole["loss"].abs()), "logits": float(whole["logits"].abs().max())}
    worst = 0.0
    for name in ("loss", "logits", *gradients):
        assert found[name].shape == expected[name].shape, name
        worst = max(worst, float((found[name] - expected[name]).abs().max()) / scales.get(name, largest))
    return worst


def distance(found: Answers, expected: Answers, names: list[str]) -> float:
    """How far some tensors are from others, as a part of these (2-norm)."""
    a, b = (torch.cat([side[name].double().reshape(-1) for name in names]) for side in (found, expected))
    return float((a - b).norm() / b.norm())
