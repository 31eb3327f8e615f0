"""fishjax: the serving core of Fish Speech on JAX."""

__version__ = "0.1.0"
