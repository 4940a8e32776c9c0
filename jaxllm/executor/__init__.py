"""Runs scheduled steps on a JAX device."""
