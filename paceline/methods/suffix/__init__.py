"""Suffix decoding: what followed the same words before, in the text and in corpora."""
