"""The wire format; generated, never edited: `protos/generate.py` writes it."""
