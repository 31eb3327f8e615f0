"""Model folders: reading, converting, quantising, storing."""
