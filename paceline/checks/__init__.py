"""The parts of `paceline.check`: reading prompts, comparing answers, explaining a difference, testing the law."""
