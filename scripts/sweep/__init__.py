"""The parts of `sweep_actions.py`."""
