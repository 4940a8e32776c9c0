"""KV outside the pool: copies to host memory, and files."""
