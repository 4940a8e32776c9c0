"""Runs the engine's own scheduler against a virtual clock instead of a device."""
