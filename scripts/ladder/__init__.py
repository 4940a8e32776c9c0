"""Parts of `scripts/profile_ladder.py`: models, measurements, fits, report."""
