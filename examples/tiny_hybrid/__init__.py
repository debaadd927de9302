"""A small hybrid language model with an MTP module: its corpus, training and packaging."""
