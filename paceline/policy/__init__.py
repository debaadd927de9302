"""Policies: how many tokens to draft this round."""

from .fixed import Fixed

__all__ = ["Fixed"]
