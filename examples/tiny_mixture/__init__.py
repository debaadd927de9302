"""A small mixture of experts: its training and packaging; what it shares with the small hybrid is there."""
