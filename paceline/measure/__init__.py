"""Measuring and checking: bench, check, tune, doctor, and their reports."""
