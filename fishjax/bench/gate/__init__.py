"""`python -m fishjax.bench gate`: is a precision policy as good as the baseline, and the voice as good as it was?"""
