"""append_kv: see README.md for the data flow and reference.py for the formula."""
