"""Frameworks side by side, each in a process of its own. Nothing in here imports an accelerator library."""
