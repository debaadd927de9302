"""EAGLE-1, 2 and 3, P-EAGLE and MTP: one layer over the target's hidden states."""
