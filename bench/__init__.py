"""Benchmarks. Threads are told how to wait before torch is imported, which reads it once."""

from paceline.system.hardware import set_waiting

set_waiting()
