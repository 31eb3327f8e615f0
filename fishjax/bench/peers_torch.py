"""The torch side, in a process of its own: torch.compile in bfloat16, and scaled_mm with the same block scales.

All calls of a chain are captured in one CUDA graph over rotated weights and replayed. Only this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

from .cases import Case, floor_us, lengths_of, matrices_of, weight_bytes
from .timing import Plan, plan, time_replays

E4M3, E4M3_MAX, BLOCK = torch.float8_e4m3fn, 448.0, 128
Call = Callable[[Any, Any], torch.Tensor]


def hello() -> dict[str, Any]:
    """What this process runs on."""
    return {"device": torch.cuda.get_device_name(), "versions": {"torch": str(torch.__version__)}}


@torch.no_grad()
def measure(case: Case, part: str, options: dict[str, Any], lock: AbstractContextManager) -> dict[str, Any]:
    """Times of "torch_compile_bf16" or "torch_block_fp8" for a case.

    The first call, which compiles, runs without the lock: compiling takes seconds, the call itself microseconds, and
    the median of another measurement does not feel one replay out of many.

    Raises:
      NotImplementedError: torch has no such thing; the message says why.
    """
    del options
    torch._dynamo.reset()  # else the ninth shape would quietly run uncompiled
    torch.manual_seed(0)
    rows = [case.m]
    if part == "torch_block_fp8":
        if case.op == "decode_attention":
            raise NotImplementedError("torch has no attention over an FP8 cache with a scale per position")
        if case.op == "between_attentions":
            raise NotImplementedError("see its matmuls")
        if case.op == "mx_matmul":
            raise NotImplementedError("its scales are another format's: see block_scaled_matmul")
        rows = list(dict.fromkeys((case.m, -(-case.m // 4) * 4, -(-case.m // 16) * 16, -(-case.m // BLOCK) * BLOCK)))
    refused = ""
    for m in rows:
        call, make_x, make_w = _side(case, part, m)
        x = make_x()
        try:
            call(x, make_w())
        except (RuntimeError, ValueError) as error:
            if "CUDA error" in str(error):
                raise
            refused = str(error).strip().splitlines()[0][:300]
            continue
        with lock:
            times = _time(call, x, make_w, plan(weight_bytes(case, part), floor_us(case)))
        return times if m == case.m else {**times, "m_padded": m}
    raise NotImplementedError(f"torch refuses it: {refused}")


def _time(call: Call, x: Any, make_w: Callable[[], Any], plan: Plan) -> dict[str, Any]:
    weights = [make_w() for _ in range(plan.copies)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for w in weights[:3]:
            call(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(x, weights[i % plan.copies]) for i in range(plan.calls)]

    def start() -> Callable[[], object]:
        graph.replay()
        ended = torch.cuda.Event()
        ended.record()
        return ended.synchronize

    times = time_replays(start, plan.calls)
    del outputs
    return times


def _side(case: Case, part: str, m: int) -> tuple[Call, Callable[[], Any], Callable[[], Any]]:
    """(call(x, w), make_x, make_w)."""
    if case.op == "decode_attention":
        return _attention_side(case)
    matrices = matrices_of(case)
    if case.op == "between_attentions":
        between, D, K = torch.compile(_between, dynamic=False), case.shape["D"], case.shape["K"]
        return (
            lambda x, w: between(*x, *w),
            lambda: (_bf16(m, D), _bf16(m, K), _bf16(D)),
            lambda: tuple(_bf16(*shape) * shape[1] ** -0.5 for shape in matrices),
        )
    width = matrices[0][1]
    if part == "torch_compile_bf16":
        function = torch.compile(_matmul if len(matrices) == 1 else _mlp, dynamic=False)
        return (
            lambda x, w: function(x, *w),
            lambda: _bf16(m, width),
            lambda: tuple(_bf16(-(-N // 64) * 64, K) * K**-0.5 for N, K in matrices),
        )
    quantize_rows = torch.compile(_quantize_rows, dynamic=False)
    activate = torch.compile(_silu_and_quantize, dynamic=False)

    def call(x: Any, w: Any) -> torch.Tensor:
        h = scaled_matmul(*(x if isinstance(x, tuple) else quantize_rows(x)), *w[0])
        return h if len(w) == 1 else scaled_matmul(*activate(h), *w[1])

    def make_x() -> Any:
        x = _bf16(m, width)
        return _quantize_rows(x) if case.input == "quantized" else x

    return call, make_x, lambda: tuple(_quantize_weight(*shape) for shape in matrices)


def _matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _mlp(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, w_gate_up).chunk(2, dim=1)
    return F.linear(F.silu(gate) * up, w_down)


def _between(
    x: torch.Tensor,
    o: torch.Tensor,
    norm: torch.Tensor,
    wo: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    wqkv: torch.Tensor,
) -> torch.Tensor:
    x = x + F.linear(o, wo)
    x = x + _mlp(F.rms_norm(x, norm.shape, norm), w_gate_up, w_down)
    return F.linear(F.rms_norm(x, norm.shape, norm), wqkv)


def _silu_and_quantize(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = h.chunk(2, dim=1)
    return _quantize_rows(F.silu(gate.float()) * up.float())


def _quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values (M, K), scales (M, K / 128) whose memory runs along M, as scaled_mm wants them)."""
    grouped = x.float().reshape(x.shape[0], -1, BLOCK)
    scale = grouped.abs().amax(-1) / E4M3_MAX
    values = (grouped / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).reshape(x.shape)
    return values, scale.t().contiguous().as_strided(scale.shape, (1, scale.shape[0]))


def _quantize_weight(N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weight (N padded to 128, K) and scales (N / 128, K / 128)."""
    w = torch.randn(-(-N // BLOCK), BLOCK, K // BLOCK, BLOCK, device="cuda") * K**-0.5
    scale = w.abs().amax((1, 3)) / E4M3_MAX
    values = (w / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return values.reshape(-1, K), scale


def scaled_matmul(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """(M, K) x (N, K) -> (M, N) bfloat16 with 1 x 128 and 128 x 128 float32 scales."""
    recipe = getattr(F, "ScalingType", None)
    if recipe is None or not hasattr(F, "scaled_mm"):
        return torch._scaled_mm(x, w.t(), scale_a=x_scale, scale_b=w_scale.t(), out_dtype=torch.bfloat16)
    return F.scaled_mm(
        x,
        w.t(),
        x_scale,
        recipe.BlockWise1x128,
        w_scale.t(),
        recipe.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


def _attention_side(case: Case) -> tuple[Call, Callable[[], Any], Callable[[], Any]]:
    s, lengths = case.shape, torch.as_tensor(lengths_of(case), device="cuda")
    mask = None
    if s["lengths"] == "mixed":
        mask = (torch.arange(s["S"], device="cuda") < lengths[:, None])[:, None, None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    function = torch.compile(attend, dynamic=False)
    shape = (case.m, s["G"], s["S"], s["d"])
    return (
        lambda x, w: function(x, *w),
        lambda: _bf16(case.m, s["H"], 1, s["d"]),
        lambda: (_bf16(*shape), _bf16(*shape)),
    )


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
