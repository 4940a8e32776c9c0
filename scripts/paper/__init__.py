"""The parts of `reproduce_paper.py`."""
