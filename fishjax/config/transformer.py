"""One decoder-only transformer of the two in a DualAR model."""

from __future__ import annotations

from dataclasses import dataclass

from fishjax.errors import WeightsError

from .fields import few_layers, flag, positive, real


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """One decoder-only transformer: the slow one (over frames) or the fast one (over codebooks)."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        few_layers(self)
        positive(self, "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
        real(self, "rope_base", "norm_eps")
        flag(self, "qkv_bias", "o_bias", "qk_norm")
        if self.num_heads % self.num_kv_heads:
            raise WeightsError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.dim % self.num_heads:
            raise WeightsError(f"dim ({self.dim}) must be a multiple of num_heads ({self.num_heads})")
        if self.head_dim % 2:
            raise WeightsError(f"head_dim ({self.head_dim}) must be even: rotary pairs")

    @property
    def qkv_dim(self) -> int:
        """Rows of `wqkv`: all query heads, then key heads, then value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
