"""Nouns of the field, imported by every other package and importing none of them."""
