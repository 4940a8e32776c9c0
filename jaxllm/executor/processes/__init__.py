"""One executor over several processes: a leader decides, and all do the same on their devices."""
