"""`python -m fishjax verify`: replay recorded numbers of the reference implementation through fishjax."""
