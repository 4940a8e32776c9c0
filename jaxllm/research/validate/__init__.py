"""Cost models against servers that others measured on GPUs."""
