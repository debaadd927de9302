"""DFlash: a few layers that draft a block in one pass."""
