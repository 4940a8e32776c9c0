"""OPT and the Llama family in Flax NNX."""
