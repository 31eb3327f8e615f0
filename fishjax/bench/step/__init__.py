"""The suite `step`: the engine's decode step and codec step at S2-Pro's size, with random weights."""
