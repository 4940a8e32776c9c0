"""The parts of `bench_gpu.py`."""
