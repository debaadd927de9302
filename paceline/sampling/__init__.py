"""From logits to distributions and from tokens to text."""
