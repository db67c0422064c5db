"""Formats: which number formats a run computes in and which it keeps its weights in, as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.config import PrecisionConfig
from hpctrain.plan.layout import ITEMSIZE


@dataclass(frozen=True)
class Format:
    """The dtypes of one choice of ``precision.compute``."""

    compute: str
    """Of the weights that multiply, of activations, and of gradients as the backward makes them."""
    master: str
    """Of what the optimizer updates and of what a checkpoint keeps."""
    summed: str
    """Of gradients as they are summed, and travel."""

    @classmethod
    def of(cls, precision: PrecisionConfig) -> Format:
        """The formats that a configuration chooses."""
        format = FORMATS[precision.compute]
        return format if precision.gradients == "wide" else replace(format, summed=format.compute)

    @property
    def mixed(self) -> bool:
        """Whether the weights that multiply are rounded copies of the ones that are updated."""
        return self.compute != self.master

    def weight_bytes(self, parameters: int) -> int:
        """Bytes of the weights that multiply."""
        return parameters * ITEMSIZE[self.compute]

    def gradient_bytes(self, parameters: int) -> int:
        """Bytes of the summed gradients."""
        return parameters * ITEMSIZE[self.summed]

    def master_bytes(self, parameters: int) -> int:
        """Bytes of the masters; none where the weights are their own."""
        return self.mixed * parameters * ITEMSIZE[self.master]


FORMATS = {
    "fp64": Format("float64", "float64", "float64"),
    "fp32": Format("float32", "float32", "float32"),
    "bf16": Format("bfloat16", "float32", "float32"),
    "fp16": Format("float16", "float32", "float32"),
}
