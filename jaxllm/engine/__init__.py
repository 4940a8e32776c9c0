"""The engine: schedule, execute, commit."""
