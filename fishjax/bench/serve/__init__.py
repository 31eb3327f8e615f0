"""`python -m fishjax.bench serve`: a real server process, listeners in processes of their own, and what they heard."""
