"""The KV cache: blocks by number, and by what they hold."""
