"""Cost predictors: what a step, a recompute or a swap will take. Imports no accelerator library."""
