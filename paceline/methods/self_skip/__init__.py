"""The target without some of its attention layers and MLPs as its draft."""
