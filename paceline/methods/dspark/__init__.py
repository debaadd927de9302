"""DSpark: DFlash's block, whose rows are told the token before them."""
