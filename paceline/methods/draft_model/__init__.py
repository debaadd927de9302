"""Draft models: a smaller model, of the same tokenizer or another one."""
