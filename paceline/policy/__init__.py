"""Policies: how many tokens to draft this round."""
