"""Compiling for NVIDIA GPUs on machines that have none."""
