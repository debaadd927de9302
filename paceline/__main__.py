"""`python -m paceline`: the command line."""

from .cli import main

main()
