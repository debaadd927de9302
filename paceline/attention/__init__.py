"""The KV cache, the cached hidden states, attention masks, and tree attention."""
