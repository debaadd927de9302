"""The target's own layers in a few bits as its draft."""
