"""The referee of `paceline check URL`: whether a server's answers stand, whatever is drafted or batched."""
