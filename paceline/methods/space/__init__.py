"""SPACE: mask tokens in the target's own pass."""
