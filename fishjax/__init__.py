"""fishjax: the serving core of Fish Speech on JAX.

import fishjax
speech = fishjax.load()                                    # minnow, the small voice that ships
frames = list(speech.speak(speech.utterance("please open the old gate")))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fishjax.engine.engine import Engine
    from fishjax.engine.sampling_params import SamplingParams
    from fishjax.speech import SpeechModel, load

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "SpeechModel", "__version__", "load"]

_HOME = {
    "Engine": "fishjax.engine.engine",
    "SamplingParams": "fishjax.engine.sampling_params",
    "SpeechModel": "fishjax.speech",
    "load": "fishjax.speech",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `import fishjax` alone must not start JAX."""
    if name not in _HOME:
        raise AttributeError(f"module 'fishjax' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
