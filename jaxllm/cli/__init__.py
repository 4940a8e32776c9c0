"""The `jaxllm` command."""
