"""Linear layers with quantised or packed weights."""
