"""Models of the package transformers, as they are and made from their configurations, shared by four ranks.

Three steps of AdamW are those of plain torch on one rank with all samples: rows of different lengths, two micro-batches
on each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import OptimConfig
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.clip import global_norm
from hpctrain.parallel.zero import Sharded, shard

transformers = pytest.importorskip("transformers", reason="no transformers: pip install hpctrain[test]")

pytestmark = pytest.mark.mpi(min_size=4)

VOCABULARY, LENGTH, ROWS, STEPS = 31, 12, 8, 3
OPTIM = OptimConfig(rate=0.01, decay=0.1)
Inputs = dict[str, Tensor]


def llama() -> nn.Module:
    """Rotary positions, key-value heads that several heads share, an output of its own."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def recomputed() -> nn.Module:
    """The same, with each layer's forward made again in its backward."""
    model = llama()
    model.config.use_cache = False
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def gpt2() -> nn.Module:
    """Learned positions, and an output that is the embedding."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=4, n_positions=LENGTH, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """Encoder and decoder with one embedding, and a bias that the first layer of each makes and all of them use."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0,
            tie_word_embeddings=True, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


MODELS = {"llama": llama, "llama recomputed": recomputed, "gpt2": gpt2, "t5": t5}
UNITS = {"llama": 3, "llama recomputed": 3, "gpt2": 3, "t5": 4}
HOW = {"0": (0, 4), "1": (1, 4), "2": (2, 4), "3": (3, 4), "copies": (3, 2)}  # stage, and ranks that share a copy


def made(model: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[model]().double().train()


def samples(model: str, step: int) -> tuple[Inputs, Tensor]:
    """What goes in and what is to come out; nothing is asked of what lies behind a row's end."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    ends = 2 + (torch.arange(ROWS) * 5 + step) % LENGTH
    targets = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= ends[:, None], -100)
    if model == "t5":
        return {"input_ids": tokens[:, 1:].flip(1), "decoder_input_ids": tokens[:, :-1]}, targets
    return {"input_ids": tokens[:, :-1]}, targets


def loss_of(model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
    """The sum over the tokens that count."""
    return F.cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")


def by_torch(model: str) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after the steps of plain torch, and the norm of each step's gradient."""
    one = made(model, 0)
    matrices = [p for p in one.parameters() if p.dim() > 1]
    vectors = [p for p in one.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": OPTIM.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.rate, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.epsilon)
    norms = []
    for step in range(STEPS):
        inputs, targets = samples(model, step)
        optimizer.zero_grad()
        (loss_of(one, inputs, targets) / (targets >= 0).sum()).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in one.parameters()])))
        optimizer.step()
    return {name: tensor.detach() for name, tensor in one.state_dict().items()}, norms


@contextmanager
def sharing(model: nn.Module, comm: MPI.Comm, stage: int, sharers: int) -> Iterator[Sharded]:
    """The model shared by neighbours, each such group with its copy."""
    parts = [comm.Split(comm.rank // sharers, comm.rank), comm.Split(comm.rank % sharers, comm.rank)]
    inner, outer = (MpiGroup(part) for part in parts)
    yield shard(model, inner, stage, replicas=outer)
    for group, part in zip((inner, outer), parts, strict=True):
        group.close()
        part.Free()


def by_us(sharded: Sharded, model: str, comm: MPI.Comm) -> tuple[dict[str, Tensor], list[float]]:
    """The same by all ranks, each with its rows, one after the other."""
    optimizer, norms, each = AdamW(sharded.flats(), OPTIM, sharded.group), [], ROWS // comm.size
    for step in range(STEPS):
        inputs, targets = samples(model, step)
        sharded.begin()
        for row in range(comm.rank * each, (comm.rank + 1) * each):
            now = slice(row, row + 1)
            with sharded.reducing(last=row + 1 == (comm.rank + 1) * each):
                loss = loss_of(sharded.module, {key: x[now] for key, x in inputs.items()}, targets[now])
                (loss / (targets >= 0).sum()).backward()
        sharded.finish()
        norms.append(global_norm([flat.gradient for flat in sharded.flats()], sharded.group))
        optimizer.update(OPTIM.rate, step)
    with sharded.whole() as whole:
        return {name: tensor.detach().clone() for name, tensor in whole.state_dict().items()}, norms


@pytest.fixture(scope="module")
def expected() -> Callable[[str], tuple[dict[str, Tensor], list[float]]]:
    """What plain torch makes of a model, once for all stages."""
    known: dict[str, tuple[dict[str, Tensor], list[float]]] = {}
    return lambda model: known.setdefault(model, known.get(model) or by_torch(model))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_transformers_trains_as_plain_torch_does(
    model: str, how: str, comm: MPI.Comm, expected, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(model, comm.rank)  # all start from the first rank's weights
    with sharing(one, comm, *HOW[how]) as sharded, caplog.at_level(logging.WARNING, "hpctrain"):
        assert sum(not part.unit.held for part in sharded.parts) == UNITS[model]
        weights, norms = by_us(sharded, model, comm)
    right, right_norms = expected(model)
    assert weights.keys() == right.keys()
    far = max(float((weights[name] - right[name]).abs().max()) for name in right)
    assert max(comm.allgather(far)) < 1e-10
    assert comm.allgather(norms == pytest.approx(right_norms, rel=1e-10)) == [True] * comm.size
    ours = [record.message for record in caplog.records if record.name.startswith("hpctrain")]
    assert ours == []  # weights are gathered ahead of their use
