"""Experts that the ranks of a group share: each has a run of them, and works for all tokens.

It is a column-parallel and a row-parallel product in one: tokens are brought together, each rank makes what its own
experts make of them, and the parts are added up, or with ``sequence`` reduce-scattered over tokens. Every rank chooses
for all tokens, from the same numbers by the same operations, and so alike; that costs a product with as many columns as
there are experts, and saves sending choices about. Of a token's weights a rank uses those of its own experts, so its
gradient of the router is a part of the whole, and the parts are summed.
"""

from __future__ import annotations

from torch import Tensor

from hpctrain.comm import autograd
from hpctrain.model.experts import Experts
from hpctrain.model.frame import Frame
from hpctrain.parallel.linear import Region


class SharedExperts(Experts):
    """This rank's run of a block's experts; ``region`` is the ranks that have the others."""

    region: Region

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        """As ``Experts`` does; with ``sequence`` of this rank's tokens, ``[n, D]``. Collective."""
        x_ND = self.region.enter(self.norm(x), frame.tokens.total)
        (router_ED,) = autograd.copies([self.router.weight], self.region.group)
        first, _ = self.region.bounds(len(router_ED))
        return self.region.leave(self.through(x_ND, router_ED, frame.balance, first)).view(x.shape)
