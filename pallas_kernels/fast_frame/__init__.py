"""fast_frame: one frame of the fast transformer, all codebooks and draws, in one kernel."""
