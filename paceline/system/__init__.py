"""System functions: hardware, files, downloads, and the provenance of results."""
