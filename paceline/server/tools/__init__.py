"""Tool calls and thoughts in answers: readers for the formats of model families, and forms that force calls."""
