"""What all commands share: options of engines, messages, and signals."""
