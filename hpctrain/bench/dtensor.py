"""The peer of the tensor-parallel benchmark: the same model of torch's modules, cut by torch's own styles.

Embedding and output are cut by vocabulary, attention and feed-forward column-wise, then row-wise, norms take parts of
each sample (``SequenceParallel``), and ``loss_parallel`` keeps the logits cut: as in torch's own tutorial.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from hpctrain.model.attention import rotate
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import ModelShape


class Peer:
    """A model cut over the ranks of ``mesh``, with the weights of ``model``; live. All ranks of the mesh make it."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        self.model = _Model(model.shape)
        self.model.load_state_dict(_renamed(model))
        parallelize_module(self.model, mesh, _plan(model.shape))

    def gradients(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss of some tokens, after their backward. All ranks call it."""
        self.model.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        return float(loss.detach())


class _Model(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(shape), _norm(shape)
        self.attention, self.mlp = _Attention(shape), _Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.rope = (shape.rope_base, shape.rope_scaling) if shape.positions == "rotary" else None
        self.query = nn.Linear(shape.width, shape.heads * shape.head_dim, "query" in shape.bias)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, "key" in shape.bias)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, "value" in shape.bias)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width, "out" in shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.head_dim)) for one in (self.query, self.key, self.value))
        if self.rope is not None:
            q, k = rotate(q, *self.rope), rotate(k, *self.rope)
        heads = [one.transpose(1, 2) for one in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
        return self.out(y.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp_width, "gate" in shape.bias) if shape.mlp == "swiglu" else None
        self.up = nn.Linear(shape.width, shape.mlp_width, "up" in shape.bias)
        self.down = nn.Linear(shape.mlp_width, shape.width, "down" in shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _norm(shape: ModelShape) -> nn.Module:
    kind = nn.LayerNorm if shape.norm == "layer" else nn.RMSNorm
    return kind(shape.width, shape.norm_epsilon)


def _renamed(model: Transformer) -> dict[str, Tensor]:
    """Our weights under the peer's names; what is kept ``[in, out]`` is ``[out, in]`` there."""
    tops = {
        "embed.tokens": "tokens.weight",
        "embed.positions": "positions.weight",
        "head.logits.weight": "output.weight",
    }
    found = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in (("attention.norm", "attention_norm"), ("mlp.norm", "mlp_norm"), ("head.norm", "norm")):
            name = name.replace(ours, theirs)
        turned = name.endswith(("out.weight", "down.weight"))
        found[tops.get(name, name)] = tensor.t().contiguous() if turned else tensor
    return found


def _plan(shape: ModelShape) -> dict[str, object]:
    whole = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, object] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    if shape.positions == "learned":
        plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    for layer in range(shape.layers):
        names = (
            "attention.query",
            "attention.key",
            "attention.value",
            "mlp.up",
            *(["mlp.gate"] * (shape.mlp == "swiglu")),
        )
        plan |= {f"blocks.{layer}.{name}": ColwiseParallel() for name in names}
        plan |= {
            f"blocks.{layer}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")
        }
        plan |= {f"blocks.{layer}.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        plan |= {f"blocks.{layer}.{name}": PrepareModuleInput(**whole) for name in ("attention", "mlp")}
    return plan
