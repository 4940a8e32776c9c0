"""Load on OpenAI-compatible servers, and what became of it. aiohttp is imported where it is used."""
