"""An OpenAI-compatible HTTP server: routes, limits, metrics and a live page over an engine's thread."""
