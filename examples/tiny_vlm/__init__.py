"""Training a small vision-language model around an existing language model: eyes from scratch, then LoRA."""
