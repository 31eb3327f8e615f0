"""The DualAR model: slow transformer over frames, fast transformer over codebooks."""
