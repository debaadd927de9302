"""Weight formats of a few bits and the kernels that multiply with them."""
