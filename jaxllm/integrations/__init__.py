"""Other projects' interfaces to the engine; each module needs that project and is imported by name."""
