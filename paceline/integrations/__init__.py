"""Other libraries: their names and options, and Paceline inside them."""
