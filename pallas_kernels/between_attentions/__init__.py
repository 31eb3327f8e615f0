"""between_attentions: what a decode step computes between one attention and the next, in one kernel."""
