"""Building blocks of the codec: causal convolutions, snake, residual units, ConvNeXt, windowed transformer.

Everything is causal and channels last: (B, T, C). A block has two doors to one body: `block(x)` runs a whole
signal that starts from silence, `block.stream(x, tail)` runs the next piece of it and returns what the piece
after that needs to know. `tail=None` means silence before; so the whole run is a stream of one piece.

Tails are nested tuples of arrays (B, steps, channels): the last inputs that a later output still sees. The
attention state is a ring of keys and values (`stream` of `Attention`).

Kernels: convolution (k, in, out). Transposed convolution (k/s, in, s*out), see `CausalTransposedConv`.
Weights set the activation dtype; norms, snake and softmax compute in float32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.config import CodecTransformerConfig
from fishjax.model.layers import FeedForward, Linear, RMSNorm, apply_rope

Tail = Any  # nested tuples of arrays; None is silence
KV = tuple[jax.Array, jax.Array]  # one layer's ring: keys and values, (B, window, H, d) each


class Kernel(nnx.Module):
    """`weight` and `bias` of a convolution; the level of naming that published checkpoints have (`conv.`)."""

    def __init__(self, shape: tuple[int, ...], fan_in: int, num_out: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.weight = nnx.Param((fan_in**-0.5 * jax.random.normal(rngs.params(), shape)).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype))


class CausalConv(nnx.Module):
    """Convolution that sees only the past: (B, T, in) -> (B, ceil(T / stride), out).

    Silence before the signal is k_eff - stride zeros, k_eff = (kernel_size - 1) * dilation + 1; a last step
    that is not whole is filled with zeros. `depthwise` convolves each channel by itself (in == out).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        depthwise: bool = False,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        fan = 1 if depthwise else in_channels
        shape = (kernel_size, fan, out_channels)
        self.conv = Kernel(shape, kernel_size * fan, out_channels, dtype=dtype, rngs=rngs)
        self.in_channels = in_channels
        self.stride = stride
        self.dilation = dilation
        self.groups = in_channels if depthwise else 1
        self.tail_steps = (kernel_size - 1) * dilation + 1 - stride

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return jnp.zeros((batch, self.tail_steps, self.in_channels), dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece; its length must be a multiple of the stride when another piece follows."""
        fill = -x_BTC.shape[1] % self.stride
        x_BTC, tail = _with_past(x_BTC, tail, self.tail_steps)
        y = jax.lax.conv_general_dilated(
            x_BTC,
            self.conv.weight[...],
            window_strides=(self.stride,),
            padding=((0, fill),),
            rhs_dilation=(self.dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=self.groups,
        )
        return y + self.conv.bias[...], tail


class CausalTransposedConv(nnx.Module):
    """Transposed convolution without its last k - s samples: (B, T, in) -> (B, T * stride, out).

    Output sample t * s + r is the sum over j < k/s of x[t - j] w[j * s + r]: an ordinary causal convolution
    of k/s taps that makes `stride` samples of `out` channels at a time. `weight` is stored as that kernel,
    (k/s, in, s * out) with the oldest tap first, so that nothing is rearranged when it runs.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, *, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        taps = kernel_size // stride
        self.conv = Kernel(
            (taps, in_channels, stride * out_channels), taps * in_channels, out_channels, dtype=dtype, rngs=rngs
        )
        self.in_channels = in_channels
        self.stride = stride
        self.tail_steps = taps - 1

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return jnp.zeros((batch, self.tail_steps, self.in_channels), dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        batch, steps = x_BTC.shape[:2]
        x_BTC, tail = _with_past(x_BTC, tail, self.tail_steps)
        y = jax.lax.conv_general_dilated(
            x_BTC,
            self.conv.weight[...],
            window_strides=(1,),
            padding=((0, 0),),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        return y.reshape(batch, steps * self.stride, -1) + self.conv.bias[...], tail


def _with_past(x_BTC: jax.Array, tail: Tail, steps: int) -> tuple[jax.Array, Tail]:
    """The signal with its `steps` past inputs in front, and the last `steps` inputs of both as the next tail."""
    if steps == 0:
        return x_BTC, x_BTC[:, :0]
    x_BTC = jnp.pad(x_BTC, ((0, 0), (steps, 0), (0, 0))) if tail is None else jnp.concatenate([tail, x_BTC], axis=1)
    return x_BTC, x_BTC[:, x_BTC.shape[1] - steps :]


class Snake(nnx.Module):
    """x + sin(alpha x)^2 / (alpha + 1e-9), `alpha` (C,) per channel."""

    def __init__(self, channels: int, *, dtype=jnp.float32):
        self.alpha = nnx.Param(jnp.ones((channels,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., C)."""
        wide, alpha = x.astype(jnp.float32), self.alpha[...].astype(jnp.float32)
        return (wide + jnp.square(jnp.sin(alpha * wide)) / (alpha + 1e-9)).astype(x.dtype)

    def silence(self, batch: int, dtype) -> Tail:
        """Nothing is remembered."""
        return ()

    def stream(self, x: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        return self(x), ()


class Chain(nnx.Module):
    """Blocks one after the other, under the published name `block`."""

    def __init__(self, blocks: Sequence[Any]):
        self.block = nnx.List(blocks)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return chain_silence(self.block, batch, dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece."""
        return run_chain(self.block, x_BTC, tail)


def chain_silence(blocks: Sequence[Any], batch: int, dtype) -> Tail:
    """The tails of `blocks` before any signal."""
    return tuple(block.silence(batch, dtype) for block in blocks)


def run_chain(blocks: Sequence[Any], x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
    """Run `blocks` in turn on the next piece of a signal."""
    tails = []
    for index, block in enumerate(blocks):
        x_BTC, next_tail = block.stream(x_BTC, None if tail is None else tail[index])
        tails.append(next_tail)
    return x_BTC, tuple(tails)


class ResidualUnit(Chain):
    """Snake, dilated convolution of 7 taps, snake, convolution of 1 tap; plus the input."""

    def __init__(self, channels: int, dilation: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        super().__init__(
            [
                Snake(channels, dtype=dtype),
                CausalConv(channels, channels, 7, dilation=dilation, dtype=dtype, rngs=rngs),
                Snake(channels, dtype=dtype),
                CausalConv(channels, channels, 1, dtype=dtype, rngs=rngs),
            ]
        )

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        y, tail = super().stream(x_BTC, tail)
        return x_BTC + y, tail


class LayerNorm(nnx.Module):
    """Layer norm over channels, computed in float32."""

    def __init__(self, width: int, eps: float, *, dtype=jnp.float32):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., C)."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class ConvNeXt(nnx.Module):
    """Depthwise convolution of 7 taps, layer norm, two linears with GELU between, scaled; plus the input."""

    def __init__(self, channels: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.dwconv = CausalConv(channels, channels, 7, depthwise=True, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(channels, 1e-6, dtype=dtype)
        self.pwconv1 = Linear(channels, 4 * channels, use_bias=True, dtype=dtype, rngs=rngs)
        self.pwconv2 = Linear(4 * channels, channels, use_bias=True, dtype=dtype, rngs=rngs)
        self.gamma = nnx.Param(jnp.full((channels,), 1e-2, dtype))

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return self.dwconv.silence(batch, dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        y, tail = self.dwconv.stream(x_BTC, tail)
        y = jax.nn.gelu(self.pwconv1(self.norm(y)), approximate=False)
        return x_BTC + self.gamma[...] * self.pwconv2(y), tail


class LayerScale(nnx.Module):
    """Multiply by `gamma` (C,)."""

    def __init__(self, width: int, *, dtype=jnp.float32):
        self.gamma = nnx.Param(jnp.full((width,), 1e-2, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., C)."""
        return x * self.gamma[...]


def window_mask(num_queries: int, window: int) -> jax.Array:
    """(T, T) bool: query i sees keys j with i - window < j <= i."""
    return _sees(jnp.arange(num_queries)[:, None], jnp.arange(num_queries)[None], window)


def _sees(query: jax.Array, key: jax.Array, window: int) -> jax.Array:
    return (key <= query) & (key > query - window)


class Attention(nnx.Module):
    """Multi-head attention over a window of the past, rotary positions, no biases."""

    def __init__(self, config: CodecTransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        heads_dim = config.num_heads * config.head_dim
        self.wqkv = Linear(config.dim, 3 * heads_dim, dtype=dtype, rngs=rngs)
        self.wo = Linear(heads_dim, config.dim, dtype=dtype, rngs=rngs)
        self.num_heads = config.num_heads
        self.window = config.window

    def __call__(self, x_BTD: jax.Array, rope_BTd2: jax.Array) -> jax.Array:
        """A whole signal. Memory grows with T * window, not T^2: long ones go in blocks of `window` queries."""
        q, k, v = self._qkv(x_BTD, rope_BTd2)
        steps, window = x_BTD.shape[1], self.window
        if steps <= 2 * window:
            return self._merge(_attend(q, [(k, v, window_mask(steps, window)[None])]))
        q, k, v = (_in_blocks(part, window) for part in (q, k, v))
        # Block n sees itself and block n - 1; block 0 sees a block of zeros, which the mask hides.
        k, v = (jnp.concatenate([_shifted(part), part], axis=2) for part in (k, v))
        key = jnp.arange(-window, window)[None]
        mask = _sees(jnp.arange(window)[:, None], key, window)
        mask_nQS = mask[None] & ((jnp.arange(q.shape[1]) > 0)[:, None, None] | (key >= 0)[None])
        batch, blocks = q.shape[:2]
        mask_BQS = jnp.broadcast_to(mask_nQS[None], (batch, *mask_nQS.shape)).reshape(-1, *mask.shape)
        q, k, v = (part.reshape(-1, *part.shape[2:]) for part in (q, k, v))
        out = _attend(q, [(k, v, mask_BQS)])
        return self._merge(out.reshape(batch, blocks * window, *out.shape[2:])[:, :steps])

    def stream(
        self, x_BTD: jax.Array, rope_BTd2: jax.Array, kv: KV, start_B: jax.Array, run_B: jax.Array
    ) -> tuple[jax.Array, KV]:
        """The next T positions, start_B .. start_B + T - 1, of each row.

        `kv` is the ring: position p lies in place p mod window. Places whose position is not yet reached are
        hidden, so a row restarts by start = 0 alone. Rows outside `run_B` write nothing.
        """
        q, k, v = self._qkv(x_BTD, rope_BTd2)
        (old_k, old_v), window, steps = kv, self.window, x_BTD.shape[1]
        place_S = jnp.arange(window)[None]
        # The newest position before start_B that falls in each place; negative: never written.
        held_BS = start_B[:, None] - 1 - (start_B[:, None] - 1 - place_S) % window
        query_BT = start_B[:, None] + jnp.arange(steps)[None]
        old_mask = _sees(query_BT[:, :, None], held_BS[:, None], window) & (held_BS >= 0)[:, None]
        out = _attend(q, [(old_k, old_v, old_mask), (k, v, window_mask(steps, window)[None])])
        kept = min(steps, window)
        row_B1 = jnp.arange(x_BTD.shape[0])[:, None]
        place_BT = jnp.where(run_B[:, None], query_BT[:, steps - kept :] % window, window)
        new_k, new_v = (
            old.at[row_B1, place_BT].set(new[:, steps - kept :].astype(old.dtype), mode="drop")
            for old, new in ((old_k, k), (old_v, v))
        )
        return self._merge(out), (new_k, new_v)

    def _qkv(self, x_BTD: jax.Array, rope_BTd2: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = jnp.split(self.wqkv(x_BTD), 3, axis=-1)
        q, k, v = (part.reshape(*part.shape[:2], self.num_heads, -1) for part in (q, k, v))
        return apply_rope(q, rope_BTd2), apply_rope(k, rope_BTd2), v

    def _merge(self, out_BTHd: jax.Array) -> jax.Array:
        return self.wo(out_BTHd.reshape(*out_BTHd.shape[:2], -1))


def _in_blocks(x_BTHd: jax.Array, size: int) -> jax.Array:
    """(B, T, H, d) -> (B, blocks, size, H, d), filled up with zeros."""
    x_BTHd = jnp.pad(x_BTHd, ((0, 0), (0, -x_BTHd.shape[1] % size), (0, 0), (0, 0)))
    return x_BTHd.reshape(x_BTHd.shape[0], -1, size, *x_BTHd.shape[2:])


def _shifted(blocks: jax.Array) -> jax.Array:
    """The block before each block; zeros before the first."""
    return jnp.pad(blocks[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))


def _attend(q_BTHd: jax.Array, parts: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """Attention of queries over several sets of (keys BSHd, values BSHd, mask B|1 T S); softmax in float32."""
    scale = q_BTHd.shape[-1] ** -0.5
    scores = [
        jnp.where(
            mask[:, None],
            jnp.einsum("bthd,bshd->bhts", q_BTHd, k.astype(q_BTHd.dtype), preferred_element_type=jnp.float32) * scale,
            -jnp.inf,
        )
        for k, _, mask in parts
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BTHd.dtype)
    splits = jnp.split(weights, [parts[0][0].shape[1]], axis=-1) if len(parts) == 2 else [weights]
    out = sum(
        jnp.einsum("bhts,bshd->bthd", weight, v.astype(weight.dtype), preferred_element_type=jnp.float32)
        for weight, (_, v, _) in zip(splits, parts, strict=True)
    )
    return jnp.asarray(out).astype(q_BTHd.dtype)


class TransformerLayer(nnx.Module):
    """Attention and feed-forward, each normed before and scaled after."""

    def __init__(self, config: CodecTransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.attention_layer_scale = LayerScale(config.dim, dtype=dtype)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim, dtype=dtype, rngs=rngs)
        self.ffn_layer_scale = LayerScale(config.dim, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, rope_BTd2: jax.Array) -> jax.Array:
        """A whole signal."""
        return self._rest(x_BTD, self.attention(self.attention_norm(x_BTD), rope_BTd2))

    def stream(
        self, x_BTD: jax.Array, rope_BTd2: jax.Array, kv: KV, start_B: jax.Array, run_B: jax.Array
    ) -> tuple[jax.Array, KV]:
        """The next piece; arguments as `Attention.stream`."""
        attended, kv = self.attention.stream(self.attention_norm(x_BTD), rope_BTd2, kv, start_B, run_B)
        return self._rest(x_BTD, attended), kv

    def _rest(self, x_BTD: jax.Array, attended_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention_layer_scale(attended_BTD)
        return x_BTD + self.ffn_layer_scale(self.feed_forward(self.ffn_norm(x_BTD)))
