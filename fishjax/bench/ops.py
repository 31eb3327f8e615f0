"""The ops under test as calls of a chain, and the tile choices that they run with: those of the Hopper kernels."""

from __future__ import annotations

import ast
import dataclasses
import functools
from typing import Any

from fishjax.errors import InvalidRequest
from pallas_kernels import (
    After,
    Before,
    _tuned,
    between_attentions,
    block_scaled_matmul,
    decode_attention,
    mx_matmul,
    swiglu_mlp,
)
from pallas_kernels.between_attentions import config as between_config
from pallas_kernels.block_scaled_matmul import config as matmul_config
from pallas_kernels.decode_attention import config as attention_config
from pallas_kernels.mx_matmul import config as mx_config
from pallas_kernels.prepare import rows_of_prepared
from pallas_kernels.swiglu_mlp import config as mlp_config

from .cases import Case, tuned_key
from .chain import Call
from .inputs import EPS

_CONFIGS = {
    "block_scaled_matmul": matmul_config.Config,
    "mx_matmul": mx_config.Config,
    "swiglu_mlp": mlp_config.Config,
    "decode_attention": attention_config.Config,
    "between_attentions": between_config.Config,
}
_MATMULS = {"block_scaled_matmul": (block_scaled_matmul, matmul_config), "mx_matmul": (mx_matmul, mx_config)}


def kernel_call(case: Case, backend: str, config: Any | None) -> Call:
    """call(x, w) of the op under test; raises NotImplementedError when traced if the back end cannot run it."""
    if case.op in _MATMULS:
        matmul, _ = _MATMULS[case.op]
        return lambda x, w: matmul(x, w[0], backend=backend, config=config)
    if case.op == "swiglu_mlp":
        return lambda x, w: swiglu_mlp(x, w[0], w[1], backend=backend, config=config)
    if case.op == "between_attentions":
        return functools.partial(_between, backend=backend, config=config)
    return lambda x, w: decode_attention(x, *w, backend=backend, config=config)


def _between(x: Any, w: Any, **options: Any) -> Any:
    residual, o, norm = x
    wo, gate_up, down, wqkv = w
    before, after = Before(wo, norm, gate_up, down), After(norm, wqkv)
    return between_attentions(residual, o, before, after, eps=EPS, **options)[1]


def config_of(case: Case, fields: dict[str, Any] | None = None) -> Any:
    """The op's own choice for the shape (measured, else its default), with `fields` changed."""
    tuned = _tuned.lookup(case.op, tuned_key(case))
    start = _CONFIGS[case.op](**tuned) if tuned is not None else _default(case)
    return dataclasses.replace(start, **(fields or {}))


def check_fields(op: str, fields: dict[str, Any]) -> None:
    """Raise InvalidRequest for a field that the op's Config does not have."""
    known = [f.name for f in dataclasses.fields(_CONFIGS[op])]
    if unknown := sorted(set(fields) - set(known)):
        raise InvalidRequest(f"--config: {op} has no {', '.join(unknown)}; it has {', '.join(known)}")


def _default(case: Case) -> Any:
    s, rows = case.shape, -(-case.m // 8) * 8
    if case.op in _MATMULS:
        return _MATMULS[case.op][1].default_config(rows, rows_of_prepared(s["N"]), s["K"])
    if case.op == "decode_attention":
        return attention_config.default_config(case.m, s["G"], s["S"])
    if case.op == "between_attentions":
        return between_config.Config()
    return mlp_config.default_config(rows)


def configs_to_try(case: Case) -> list[dict[str, Any]]:
    """The fields of every config that the tuner times for a case."""
    s, rows = case.shape, -(-case.m // 8) * 8
    if case.op in _MATMULS:
        found = _MATMULS[case.op][1].configs_to_try(rows, rows_of_prepared(s["N"]), s["K"])
    elif case.op == "swiglu_mlp":
        found = mlp_config.configs_to_try(rows, s["D"], s["F"])
    elif case.op == "between_attentions":
        found = between_config.configs_to_try()
    else:
        kv_bytes = 1 if s["cache"] == "float8" else 2
        found = attention_config.configs_to_try(case.m, s["H"], s["G"], s["S"], s["d"], kv_bytes)
    return [dataclasses.asdict(config) for config in found]


def parse_config(text: str) -> dict[str, Any]:
    """Fields from "tile_n=128,early=True".

    Raises:
      InvalidRequest: a part without "=".
    """
    fields = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidRequest(f"--config: {part!r} is not NAME=VALUE; example: --config 'tile_n=128,splits=4'")
        try:
            fields[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            fields[name.strip()] = value.strip()
    return fields
