"""Sound files and sample formats."""
