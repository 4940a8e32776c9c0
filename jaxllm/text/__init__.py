"""Text and tokens: tokenizers, chat templates, and text as it comes."""
