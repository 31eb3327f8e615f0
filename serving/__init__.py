"""The gRPC service around a fishjax engine: `python -m serving`."""
