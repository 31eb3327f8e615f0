"""`python -m fishjax.bench`: measurements and gates."""
