"""Medusa and blockwise decoding: a head for each position ahead."""
