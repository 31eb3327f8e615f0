"""Fixed slots and one compiled step."""
