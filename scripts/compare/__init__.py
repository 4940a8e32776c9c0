"""Parts of `scripts/compare_frameworks.py`. Nothing in here imports an accelerator library."""
