"""Threads, processes, files and hardware, as all else uses them."""
