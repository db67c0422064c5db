"""A model that ranks share is the model of one rank: losses, logits, gradients, dropped elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.errors import PlanError, ShapeError
from hpctrain.model.noise import Noise
from hpctrain.model.parts import fan
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.tensor import own, tensor_parallel
from hpctrain.plan import rules
from hpctrain.plan.layout import Box
from hpctrain.plan.mesh import Mesh
from tests.support.tensors import Answers, Case, boxes, difference, distance, run

GPT2, LLAMA, QWEN3 = (dict(family=family) for family in ("gpt2", "llama", "qwen3"))
MIXTRAL = dict(family="mixtral", experts=4, mlp_width=24, balance_loss=0.5)
SMOOTH, Z = dict(smoothing=0.1), dict(z_loss=0.01)

CASES = {
    "gpt2": Case(GPT2),
    "gpt2, tokens whole": Case(GPT2, sequence=False),
    "llama": Case(LLAMA),
    "llama, tokens whole": Case(LLAMA, sequence=False),
    "two heads of keys": Case(LLAMA | dict(kv_heads=2, dropout=0.2), documents=True),
    "one head of keys": Case(LLAMA | dict(kv_heads=1, tied=True), sequence=False, terms=SMOOTH | Z),
    "one head of keys and biases": Case(GPT2 | dict(kv_heads=1, dropout=0.2, tied=False), documents=True, terms=Z),
    "dropout, tokens whole": Case(GPT2 | dict(kv_heads=2, dropout=0.2), sequence=False, terms=SMOOTH),
    "documents, tokens whole": Case(LLAMA | dict(tied=True, dropout=0.2), sequence=False, documents=True, terms=Z),
    "untied": Case(GPT2 | dict(tied=False, kv_heads=2), terms=SMOOTH | Z, documents=True, sequence=False),
    "tied": Case(LLAMA | dict(tied=True, kv_heads=1, dropout=0.2), terms=SMOOTH),
    "biases of queries, keys and values": Case(dict(family="qwen2", kv_heads=2)),
    "norms of heads": Case(QWEN3 | dict(kv_heads=2, head_dim=6, dropout=0.2)),
    "norms of heads, tokens whole": Case(QWEN3 | dict(kv_heads=1, rope_scaling=(4, 1, 4, 6)), sequence=False),
    "odd mlp": Case(LLAMA | dict(mlp_width=37), terms=SMOOTH),
    "odd mlp with biases": Case(GPT2 | dict(mlp_width=41, dropout=0.2), rows=1),
    "fewer tokens than ranks": Case(LLAMA | dict(sequence=3, dropout=0.2), rows=1),
    "experts": Case(MIXTRAL | dict(kv_heads=2)),
    "experts, tokens whole": Case(MIXTRAL | dict(dropout=0.2), sequence=False, terms=Z),
    "experts, three of eight": Case(MIXTRAL | dict(experts=8, experts_per_token=3, kv_heads=1, tied=True)),
    "experts, fewer tokens than ranks": Case(MIXTRAL | dict(sequence=3, experts_per_token=1), rows=1),
    "experts, recomputed": Case(MIXTRAL, recompute="full", documents=True, first=True),
    "experts, laid aside": Case(MIXTRAL | dict(dropout=0.2), sequence=False, recompute="offload"),
    "recomputed": Case(GPT2 | dict(dropout=0.2), recompute="full", documents=True),
    "recomputed, told before": Case(LLAMA | dict(dropout=0.2), recompute="every:2", first=True),
    "recomputed attention": Case(LLAMA | dict(kv_heads=2), recompute="selective", first=True),
    "laid aside": Case(GPT2 | dict(kv_heads=1, dropout=0.2), recompute="offload", documents=True, first=True),
}
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
every_rank = pytest.mark.parametrize("ranks", [1, 2, 4])


def answers(case: Case, ranks: int) -> list[Answers]:
    return run(case, ranks, lambda group, copies: case.answers(case.shared(group, copies)))


def worst(case: Case, ranks: int) -> float:
    whole = case.alone()
    found = answers(case, ranks)
    return max(difference(one, boxes(case, ranks, rank, whole), whole) for rank, one in enumerate(found))


@every_rank
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_model_answer_as_one_rank_does(name: str, ranks: int) -> None:
    assert worst(CASES[name], ranks) < BOUNDS[torch.float64]


def test_each_two_choices_meet_in_some_case() -> None:
    rows = [
        (case.shape.norm, case.sequence, case.shape.kv_heads, case.shape.tied, case.shape.dropout > 0, case.documents,
         "smoothing" in case.terms, "z_loss" in case.terms)
        for case in CASES.values()
    ]  # fmt: skip
    for one, other in combinations(list(zip(*rows, strict=True)), 2):
        assert len(set(zip(one, other, strict=True))) == len(set(one)) * len(set(other))


@pytest.mark.parametrize("knobs", [GPT2 | dict(kv_heads=1, dropout=0.2), LLAMA | dict(kv_heads=2)], ids=str)
@pytest.mark.parametrize("sequence", [True, False])
def test_they_do_so_in_single_precision(knobs: dict, sequence: bool) -> None:
    assert worst(Case(knobs, sequence, dtype=torch.float32), 4) < BOUNDS[torch.float32]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("family", [GPT2, LLAMA, MIXTRAL | dict(experts_per_token=4)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.bfloat16, "none"), (torch.float16, "none"), (torch.float32, "tensor"), (torch.float32, "block")],
)
def test_short_formats_are_no_further_from_the_truth_than_on_one_rank(
    dtype: torch.dtype, fp8: str, family: dict, sequence: bool
) -> None:
    case = Case(family | dict(mlp_width=64), sequence, dtype=dtype, fp8=fp8, first=sequence)
    truth, one = case.wide(), case.alone()
    for rank, found in enumerate(answers(case, 2)):
        expected, theirs = boxes(case, 2, rank, truth), boxes(case, 2, rank, one)
        gradients = [name for name in found if name not in ("loss", "count")]
        assert distance(found, expected, gradients) < 1.25 * distance(theirs, expected, gradients)
        assert abs(found["loss"] / expected["loss"] - 1) < 0.02


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("knobs", [GPT2 | dict(kv_heads=1, tied=False), LLAMA, QWEN3, MIXTRAL], ids=str)
def test_what_every_rank_has_whole_has_bit_for_bit_one_gradient(knobs: dict, sequence: bool) -> None:
    case = Case(knobs, sequence, dtype=torch.float32)
    layouts, found = rules.layouts(case.shape, "float32"), answers(case, 4)
    whole = [name for name, layout in layouts.items() if not layout.cuts]
    assert len(whole) >= 5
    for name in whole:
        assert all(torch.equal(one[name], found[0][name]) for one in found), name
    for one in found[1:]:
        assert torch.equal(one["loss"], found[0]["loss"])


@pytest.mark.parametrize("sequence", [True, False])
def test_copies_of_a_head_have_bit_for_bit_one_gradient(sequence: bool) -> None:
    case = Case(GPT2 | dict(kv_heads=2), sequence, dtype=torch.float32)
    first, second, third, _ = answers(case, 4)
    names = [f"blocks.1.attention.{part}.{of}" for part in ("key", "value") for of in ("weight", "bias")]
    assert all(torch.equal(first[name], second[name]) for name in names)
    assert not any(torch.equal(first[name], third[name]) for name in names)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("sequence", "apart"), [(False, 24), (True, 34)])
def test_a_block_keeps_the_published_bytes(sequence: bool, apart: int, ranks: int) -> None:
    """Of 34 bytes for each element of a block's input, Korthikanti 2022 (section 4) has 24 or all of them shared."""
    rows, length, width = 2, 16, 32

    def rank(layers: int, group: Group, copies: Group) -> int:
        knobs = GPT2 | dict(layers=layers, sequence=length, width=width, dropout=0.1)
        model = Case(knobs, sequence, dtype=torch.bfloat16).shared(group, copies)
        tokens, kept = torch.zeros(rows, length, dtype=torch.int64), {}
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def put(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(put, lambda tensor: tensor):
            loss = model.loss(tokens, tokens, noise=Noise(1, 0, (0, 1)))
        assert loss[0].requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    few, many = (run(Case(GPT2), ranks, partial(rank, layers))[0] for layers in (2, 4))
    softmax = 4 * 4 / width / ranks  # one fp32 number for each head of a token, which attention's kernel keeps
    assert (many - few) / 2 / (rows * length * width) == (34 - apart) + apart / ranks + softmax


# ---- the change itself -----------------------------------------------------------------------------------------------


@every_rank
@pytest.mark.parametrize("knobs", [GPT2 | dict(kv_heads=1), LLAMA | dict(kv_heads=2, mlp_width=37), MIXTRAL], ids=str)
def test_parameters_keep_their_names_and_have_the_shapes_and_numbers_of_their_boxes(knobs: dict, ranks: int) -> None:
    case = Case(knobs)
    whole, mesh = dict(case.whole().named_parameters()), Mesh(rules.axes(case.shape, ranks))
    layouts = rules.layouts(case.shape, "float64")
    for rank, model in enumerate(run(case, ranks, case.shared)):
        found = dict(model.named_parameters())
        assert list(found) == list(whole) == list(layouts)
        for name, layout in layouts.items():
            (box,) = layout.boxes(mesh, rank)
            assert torch.equal(found[name], whole[name][box.slices]), name
            assert found[name].is_contiguous() and len(list(layout.runs(mesh, rank))) == 1


@pytest.mark.parametrize("sequence", [True, False])
def test_a_model_keeps_its_parameters_and_who_holds_them(sequence: bool) -> None:
    case = Case(LLAMA)

    def rank(group: Group, copies: Group) -> bool:
        model = case.whole()
        parameters, modules = list(model.parameters()), list(model.modules())
        tensor_parallel(model, group, sequence, copies)
        return all(map(lambda a, b: a is b, parameters + modules, [*model.parameters(), *model.modules()]))

    assert all(run(case, 2, rank))


def expanded(case: Case) -> Transformer:
    """A model whose parameters are one number each, in all the places of their shapes."""
    model = case.whole()
    for parameter in model.parameters():
        parameter.data = torch.zeros(()).expand(parameter.shape)
    return model


def on_meta(case: Case) -> Transformer:
    with torch.device("meta"):
        return Transformer(case.shape)


@pytest.mark.parametrize("make", [expanded, on_meta])
@pytest.mark.parametrize("knobs", [GPT2, LLAMA, MIXTRAL], ids=str)
def test_a_model_without_memory_is_changed_without_any(knobs: dict, make: Callable[[Case], Transformer]) -> None:
    case = Case(knobs)

    def rank(group: Group, copies: Group) -> dict[str, tuple[int, ...]]:
        model = make(case)
        tensor_parallel(model, group, True, copies)
        assert all(p.is_meta or p.untyped_storage().nbytes() == 4 for p in model.parameters())
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    mesh, layouts = Mesh(rules.axes(case.shape, 2)), rules.layouts(case.shape, "float64")
    for index, found in enumerate(run(case, 2, rank)):
        assert found == {name: layout.box(mesh, index).shape for name, layout in layouts.items()}


def test_a_part_takes_memory_only_where_the_whole_has_some() -> None:
    box = Box((2, 0), (3, 4))
    assert own(torch.zeros(()).expand(6, 4), box).untyped_storage().nbytes() == 4
    assert own(torch.zeros(6, 4), box).untyped_storage().nbytes() == 3 * 4 * 4
    assert own(torch.zeros(6, 4, device="meta"), box).is_meta


def test_a_rank_alone_has_the_model_as_it_was() -> None:
    case = Case(GPT2 | dict(dropout=0.2))
    model = case.whole()
    tensor_parallel(model, SoloGroup())
    found, expected = case.answers(model), case.alone()
    assert difference(found, expected, expected) < 1e-12


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do() -> None:
    with pytest.raises(PlanError, match="parallel.tp = 3 does not fit a model of 4 heads") as told:
        run(Case(GPT2), 2, lambda group, copies: rules.check(Case(GPT2).shape, 3))
    assert "one of 1, 2, 4" in told.value.mend


def test_experts_that_do_not_divide_are_refused_with_the_numbers_of_ranks_that_do() -> None:
    shape = Case(MIXTRAL | dict(experts=6)).shape
    with pytest.raises(PlanError, match="parallel.tp = 4 does not fit .* 4 of keys and values, 6 experts\n") as told:
        rules.check(shape, 4)
    assert "whole experts" in told.value.why and told.value.mend == "set parallel.tp to one of 1, 2"


def test_copies_of_a_head_without_their_group_are_refused_with_their_mend() -> None:
    case = Case(LLAMA | dict(kv_heads=1))
    with pytest.raises(PlanError, match="on 2 ranks, but copies is a group of 1") as told:
        run(case, 2, lambda group, copies: tensor_parallel(case.whole(), group))
    assert 'copies=groups["tp_copy"]' in told.value.mend


def test_a_model_that_is_shared_already_is_refused_with_its_mend() -> None:
    case = Case(LLAMA)

    def twice(group: Group, copies: Group) -> None:
        model = case.shared(group, copies)
        tensor_parallel(model, group)

    with pytest.raises(ShapeError, match=r"embed.tokens has the shape \[26, 32\], where the whole weight has") as told:
        run(case, 2, twice)
    assert "make the model anew" in told.value.mend


def test_another_loss_may_be_told_before_or_after() -> None:
    case = Case(LLAMA)

    def rank(group: Group, copies: Group, before: bool) -> torch.Tensor:
        model = case.whole()
        if before:
            model.head.loss = partial(model.head.loss, z_loss=0.1)
        tensor_parallel(model, group, True, copies)
        if not before:
            model.head.loss = partial(model.head.loss, z_loss=0.1)
        return case.answers(model)["loss"]

    found = [run(case, 2, partial(rank, before=before))[0] for before in (True, False)]
    assert torch.equal(*found) and found[0] > case.alone()["loss"]


def test_a_plain_model_knows_nothing_of_ranks() -> None:
    model = Case(LLAMA).whole()
    assert all(part.fan is fan for block in model.blocks.values() for part in (block.attention, block.mlp))
