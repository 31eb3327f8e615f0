"""What `kernels` measures: every op at S2-Pro's shapes and row counts, and the bytes each call must move.

A case is plain data: it travels to a worker process as JSON and names a row of the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fishjax.errors import InvalidRequest
from pallas_kernels import _tuned
from pallas_kernels._testing import TOLERANCES
from pallas_kernels.between_attentions import arg_specs as between_specs
from pallas_kernels.block_scaled_matmul import arg_specs as matmul_specs
from pallas_kernels.decode_attention import arg_specs as attention_specs
from pallas_kernels.mx_matmul import arg_specs as mx_specs
from pallas_kernels.prepare import rows_of_prepared
from pallas_kernels.swiglu_mlp import arg_specs as mlp_specs
from pallas_kernels.types import BLOCK, MX_BLOCK

OPS = ("block_scaled_matmul", "mx_matmul", "swiglu_mlp", "decode_attention", "between_attentions")
MATMULS = {"block_scaled_matmul": matmul_specs, "mx_matmul": mx_specs}
"""One weight (N, K); x may come quantised."""
PEERS = ("xla_bf16", "xla_fp8", "torch_compile_bf16", "torch_block_fp8")
STREAM_BYTES_PER_S = 4.48e12
"""Measured on one H200: a Pallas kernel that only streams through TMA, 64 KB or more in flight per SM."""
MIXED_LENGTHS = (64, 1024)
MIXED_SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One row: an op at one shape with m rows.

    op: a name in OPS. name: of the shape in the op's arg_specs, or "custom". shape: N, K (matmul), D, F (MLP),
    D, K, N, F (between attentions) or H, G, S, d, cache, lengths (attention). m: rows; active slots for attention.
    input: "quantized" when x comes quantised (the matmuls alone), else "bfloat16".
    """

    op: str
    name: str
    shape: Mapping[str, Any]
    m: int
    input: str = "bfloat16"

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> str:
        """One string that tells cases apart, readable in a progress line."""
        return case_key(self.op, self.shape, self.m, self.input)

    @property
    def group(self) -> str:
        """The same for cases whose bfloat16 peers are one measurement, however their own operands are quantised."""
        shape = {**self.shape, "cache": "bfloat16"} if "cache" in self.shape else self.shape
        return case_key("matmul" if self.op in MATMULS else self.op, shape, self.m, "bfloat16")


def case_key(op: str, shape: Mapping[str, Any], m: int, input: str) -> str:
    """The key of a case, from the fields that a row of the results carries."""
    return f"{op} {','.join(f'{k}={v}' for k, v in shape.items())} m={m} {input}"


def tolerance(case: Case) -> float:
    """Bound on the relative error of a case's output."""
    if case.op == "between_attentions":
        return TOLERANCES[case.op, "qkv"].bound
    return TOLERANCES["matmul" if case.op in MATMULS else case.op, "bfloat16"].bound


def grid() -> list[Case]:
    """Every combination that a frozen file must hold."""
    matmuls = [
        Case(op, spec.name, {"N": spec.N, "K": spec.K}, m, kind)
        for op, specs in MATMULS.items()
        for spec in specs.SPECS
        if spec.name != "fast_output"  # the head's shape less one row
        for m in specs.ROWS
        for kind in ("quantized", "bfloat16")
    ]
    mlps = [
        Case("swiglu_mlp", spec.name, {"D": spec.D, "F": spec.F}, m) for spec in mlp_specs.SPECS for m in mlp_specs.ROWS
    ]
    attention = [
        _attention(spec, cache, lengths)
        for spec in attention_specs.BENCHMARKED
        for cache in attention_specs.CACHES
        for lengths in ("full", "mixed")
        if lengths == "full" or (spec.B, spec.S) == (64, 1024)
    ]
    between = [_between("s2_pro", between_specs.BetweenSpec("s2_pro", m)) for m in between_specs.ROWS]
    return matmuls + mlps + attention + between


def _between(name: str, spec: between_specs.BetweenSpec) -> Case:
    return Case("between_attentions", name, {"D": spec.D, "K": spec.K, "N": spec.N, "F": spec.F}, spec.M)


def _attention(spec: attention_specs.AttentionSpec, cache: str, lengths: str) -> Case:
    shape = {"H": spec.H, "G": spec.G, "S": spec.S, "d": spec.d, "cache": cache, "lengths": lengths}
    return Case("decode_attention", f"slow_{spec.S}", shape, spec.B)


def tiny_grid() -> list[Case]:
    """A few small cases for a machine without a GPU: they show that everything runs, and measure nothing of note."""
    small = attention_specs.AttentionSpec("tiny", 2, 4, 2, 128, 64)
    return [
        *(Case(op, "tiny", {"N": 256, "K": 256}, 8, kind) for op in MATMULS for kind in ("quantized", "bfloat16")),
        Case("swiglu_mlp", "tiny", {"D": 128, "F": 256}, 8),
        *(_attention(small, cache, "full") for cache in attention_specs.CACHES),
        _between("tiny", between_specs.BetweenSpec("tiny", 8, D=256, K=256, N=256, F=256)),
    ]


def select(
    cases: Iterable[Case],
    ops: list[str] | None = None,
    shapes: list[str] | None = None,
    rows: list[int] | None = None,
    n: int | None = None,
    k: int | None = None,
) -> list[Case]:
    """The cases that fit all filters; a matmul shape that is not in the grid is made from n, k and one row count.

    Raises:
      InvalidRequest: nothing fits, or only one of n and k is given.
    """
    cases = list(cases)
    if (n is None) != (k is None):
        raise InvalidRequest("--n and --k go together: the weight is (N, K)")
    if n is not None and not any(c.shape.get("N") == n and c.shape.get("K") == k for c in cases):
        cases += [
            Case(op, "custom", {"N": n, "K": k}, m, kind)
            for op, specs in MATMULS.items()
            for m in rows or specs.ROWS
            for kind in ("quantized", "bfloat16")
        ]
    chosen = [
        c
        for c in cases
        if (not ops or c.op in ops)
        and (not shapes or c.name in shapes)
        and (not rows or c.m in rows)
        and (n is None or (c.shape.get("N"), c.shape.get("K")) == (n, k))
    ]
    if not chosen:
        names = sorted({c.name for c in cases})
        raise InvalidRequest(f"no case fits these filters; ops: {', '.join(OPS)}; shapes: {', '.join(names)}")
    return chosen


def lengths_of(case: Case) -> np.ndarray:
    """(slots,) int32 live positions of an attention case."""
    if case.shape["lengths"] == "full":
        return np.full(case.m, case.shape["S"], np.int32)
    low, high = MIXED_LENGTHS
    return np.random.default_rng(MIXED_SEED).integers(low, high, case.m, dtype=np.int32, endpoint=True)


def weight_bytes(case: Case, peer: str | None = None) -> int:
    """Bytes of what is rotated between calls (weights; keys and values), for the op or for one of its peers."""
    s = case.shape
    if case.op == "decode_attention":
        positions = int(lengths_of(case).sum()) * s["G"] * 2
        fp8 = s["cache"] == "float8" and peer in (None, "xla_fp8")
        return positions * (s["d"] + 4 if fp8 else 2 * s["d"])
    matrices = matrices_of(case)
    if peer in ("xla_bf16", "torch_compile_bf16"):
        return sum(2 * n * k for n, k in matrices)
    if case.op == "mx_matmul" and peer is None:
        return sum(n * (k + k // MX_BLOCK) for n, k in matrices)
    return sum(n * k + math.ceil(n / BLOCK) * (k // BLOCK) * 4 for n, k in matrices)


def matrices_of(case: Case) -> list[tuple[int, int]]:
    """(rows, columns) of each weight of a matmul, an MLP, or between attentions (wo, gate and up, down, wqkv)."""
    s = case.shape
    if case.op == "between_attentions":
        return [(s["D"], s["K"]), (2 * s["F"], s["D"]), (s["D"], s["F"]), (s["N"], s["D"])]
    return [(s["N"], s["K"])] if case.op in MATMULS else [(2 * s["F"], s["D"]), (s["D"], s["F"])]


def floor_us(case: Case) -> float:
    """Time to move what must move: weights and scales (live keys and values), activations in and out."""
    s = case.shape
    if case.op == "decode_attention":
        activations = 2 * case.m * s["H"] * s["d"] * 2
    elif case.op == "swiglu_mlp":
        activations = 2 * case.m * s["D"] * 2
    elif case.op == "between_attentions":
        activations = case.m * (2 * s["K"] + 2 * s["N"] + 2 * 4 * s["D"])
    else:
        scales = s["K"] // MX_BLOCK if case.op == "mx_matmul" else s["K"] // BLOCK * 4
        each = s["K"] + scales if case.input == "quantized" else 2 * s["K"]
        activations = case.m * (each + 2 * s["N"])
    return (weight_bytes(case) + activations) / STREAM_BYTES_PER_S * 1e6


def tuned_key(case: Case) -> str:
    """Under which key the op looks this case's config up in tuned/<device>.json."""
    s = case.shape
    if case.op == "decode_attention":
        parts = (case.m, s["G"], s["S"], s["d"], s["cache"])
    elif case.op == "swiglu_mlp":
        parts = (_tuned.bucket(case.m), s["D"], s["F"])
    elif case.op == "between_attentions":
        parts = (_tuned.bucket(case.m), s["D"], s["K"], s["N"], s["F"])
    else:
        parts = (_tuned.bucket(case.m), rows_of_prepared(s["N"]), s["K"])
    return "x".join(map(str, parts))
