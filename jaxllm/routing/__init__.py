"""Which of several engines answers a request: decisions alone, which need neither JAX nor Ray."""
