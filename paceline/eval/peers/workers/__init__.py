"""Scripts that run in a peer's interpreter: they import the standard library and the peer, nothing of this package."""
