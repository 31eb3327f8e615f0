"""causal_conv: see README.md for the data flow and reference.py for the formula."""
