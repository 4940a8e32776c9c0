"""The parts of `compare_policies.py`."""
