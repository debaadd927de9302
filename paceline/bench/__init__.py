"""The benchmark: plain and speculative decoding of the same prompts, taking turns in one process."""
