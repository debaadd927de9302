"""tiny-vlm: a small vision-language model around an existing language model, trained from scratch and shown."""
