"""Trained draft heads and small vision-language models for Paceline, one folder each; see `README.md`."""

from pathlib import Path

FOLDER = Path(__file__).parent
