"""Many prompts: files of them, their answers, and evaluation."""
