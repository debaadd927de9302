"""What shows Paceline at work and is no part of the library."""
