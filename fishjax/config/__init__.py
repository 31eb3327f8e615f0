"""Shapes of the models: frozen, hashable dataclasses read from public files.

Place in the flow: everything below takes one of these; nothing here knows weights, JAX or text.
"""

from .codec import CodecConfig, CodecTransformerConfig
from .dual_ar import Fused, ModelConfig, PromptLayout, s2_pro
from .files import read_json
from .profile import SpeechProfile
from .transformer import TransformerConfig

__all__ = [
    "CodecConfig",
    "CodecTransformerConfig",
    "Fused",
    "ModelConfig",
    "PromptLayout",
    "SpeechProfile",
    "TransformerConfig",
    "read_json",
    "s2_pro",
]
