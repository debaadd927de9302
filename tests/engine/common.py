"""Answers that are pushed out of their slots again and again."""

import random

import pytest

from paceline.engine.scheduler import Scheduler


def push(monkeypatch: pytest.MonkeyPatch, often: float, seed: int = 0) -> None:
    """Before each step, preempt every answer that has a slot with this probability, in the middle of its prompt too."""
    whole, rng = Scheduler.step, random.Random(seed)

    def step(self):
        for answer in list(self._holders):
            if rng.random() < (often if answer in self._running else often / 4):
                self.preempt(answer)
        return whole(self)

    monkeypatch.setattr(Scheduler, "step", step)
