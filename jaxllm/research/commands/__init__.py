"""Commands of research, which the command line loads by name."""
