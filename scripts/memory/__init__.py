"""Parts of the benchmarks of KV memory: what copies, paging and allocation cost."""
