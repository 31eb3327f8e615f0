"""What `step` measures: slots and precision policies, the live lengths of the slots, and the bytes a step must move.

A case is plain data: it travels to a worker process as JSON and names a row of the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fishjax.config import CodecConfig, CodecTransformerConfig, Fused, ModelConfig, TransformerConfig, s2_pro
from fishjax.errors import InvalidRequest
from fishjax.weights.precision import Precision

SLOTS = (64, 1, 16, 4)
POLICIES = ("slow=fp8,fast=fp8,head=fp8,kv=fp8", "bf16", "slow=fp8,fast=fp8,head=fp8")
"""On top of bf16 for everything. Both in the order of their worth: a budget cuts the last ones."""
PEER_POLICY = "bf16"
MAX_LEN = 1024
LENGTHS, LENGTHS_SEED = (64, 1024), 0
CYCLE = 32
"""Steps after which lengths are set back: a slot is never further than half of it from the length it was given."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One row. model: "s2_pro" or "tiny". policy: as `Precision.parse` reads it, on top of bf16 for everything.

    fused: which transformers go through fused kernels (`fishjax.model.fused`).
    """

    model: str
    slots: int
    policy: str
    fused: Fused = "none"

    @property
    def key(self) -> str:
        """One string that tells cases apart, readable in a progress line."""
        return f"{self.model} slots={self.slots} {self.policy} fused={self.fused}"

    @property
    def precision(self) -> Precision:
        """The whole policy. Raises InvalidRequest for one that does not exist."""
        return Precision.parse(self.policy, Precision.uniform("bf16"))

    @property
    def configs(self) -> tuple[ModelConfig, CodecConfig]:
        """Shapes of the model and of its codec."""
        return (s2_pro(), CodecConfig()) if self.model == "s2_pro" else (_tiny(), _tiny_codec())

    @property
    def im_end_id(self) -> int:
        """The end of speech: the id that the semantic ones do not hold and S2-Pro's tokenizer has."""
        return 151645 if self.model == "s2_pro" else 0

    @property
    def max_len(self) -> int:
        """Columns a slot holds."""
        return MAX_LEN

    @property
    def lengths_B(self) -> np.ndarray:
        """Live columns of each slot, int32: evenly spread over LENGTHS, so that the mean is the same for any slots."""
        low, high = LENGTHS
        spread = low + (high - low) * (np.arange(self.slots) + 0.5) / self.slots
        return np.random.default_rng(LENGTHS_SEED).permutation(spread).round().astype(np.int32)

    @property
    def start_B(self) -> np.ndarray:
        """Where a cycle begins: `lengths_B` lies in its middle, or as near as the slot's room allows."""
        return np.minimum(self.lengths_B - CYCLE // 2, self.max_len - CYCLE).astype(np.int32)


def grid() -> list[StepCase]:
    """Every combination that a frozen file must hold."""
    return _forms("s2_pro", POLICIES, SLOTS)


def tiny_grid() -> list[StepCase]:
    """Small cases for a machine without a GPU: they show that everything runs, and measure nothing of note."""
    return _forms("tiny", POLICIES[:2], [2])


def select(cases: Iterable[StepCase], slots: Sequence[int] | None, policies: Sequence[str] | None) -> list[StepCase]:
    """The cases asked for; slots and policies that are not in the grid are made.

    Raises InvalidRequest for a number of slots or a policy that cannot be.
    """
    cases = list(cases)
    wanted = policies or tuple(dict.fromkeys(case.policy for case in cases))
    counts = slots or tuple(dict.fromkeys(case.slots for case in cases))
    if any(count < 1 for count in counts):
        raise InvalidRequest(f"--slots must be at least 1, not {min(counts)}")
    return _forms(cases[0].model, wanted, counts)


def _forms(model: str, policies: Iterable[str], counts: Iterable[int]) -> list[StepCase]:
    """Of each policy and number of slots every step that there is: fused where transformers are FP8, and the plain one.

    Of a policy with a bfloat16 cache only the most fused one: the cache changes attention and nothing else.
    """
    found = []
    for policy, slots in itertools.product(policies, counts):
        case = StepCase(model, slots, policy)
        forms: list[Fused] = ["none"]
        if case.precision.slow == "fp8":
            forms = ["both", "slow", "none"] if case.precision.fast == "fp8" else ["slow", "none"]
        found += [replace(case, fused=form) for form in (forms if case.precision.kv == "fp8" else forms[:1])]
    return found


def _tiny() -> ModelConfig:
    """S2's structure at widths that FP8 and the fused kernels can take."""
    slow = TransformerConfig(2, 256, 4, 2, 64, 384, rope_base=1e6, norm_eps=1e-6, qk_norm=True)
    fast = TransformerConfig(1, 128, 2, 1, 128, 256, rope_base=1e6, norm_eps=1e-6)
    return ModelConfig(
        slow, fast, 512, 4, 128, 384, 511, scale_codebook_embeddings=True, norm_fastlayer_input=True
    )  # fmt: skip


def _tiny_codec() -> CodecConfig:
    return CodecConfig(
        encoder_dim=8,
        encoder_rates=(2, 2),
        encoder_transformer_layers=(0, 1),
        encoder_head_dim=16,
        decoder_dim=32,
        decoder_rates=(2, 2),
        latent_dim=64,
        semantic_codebook_size=128,
        residual_codebook_size=32,
        num_residual_codebooks=3,
        downsample_factors=(2,),
        transformer=CodecTransformerConfig(2, 64, 4, 16, 128, window=6),
    )
