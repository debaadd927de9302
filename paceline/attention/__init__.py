"""The KV cache, the hidden states beside it, which columns a node may see, and attention over them."""
