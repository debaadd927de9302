"""The floor of a pass in this very run: memory bandwidth drifts from hour to hour, so it is measured along."""

import statistics
from dataclasses import dataclass

from ..runner import LoadedModel


@dataclass
class Floor:
    """Bytes that a pass must read, and the bandwidth found each time it was measured, in bytes per second."""

    weight_bytes: int
    samples: list[float]

    @property
    def bandwidth(self) -> float | None:
        """Median of what was measured."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def seconds(self) -> float | None:
        """The least a pass can take."""
        return self.weight_bytes / self.bandwidth if self.bandwidth else None

    def measure(self, loaded: LoadedModel) -> None:
        """Add one sample; takes less than a second."""
        from .machine import read_bandwidth

        self.samples.append(read_bandwidth(loaded.device))


def floor_of(loaded: LoadedModel) -> Floor:
    """The floor of a model, not measured yet."""
    from .machine import weight_bytes

    return Floor(weight_bytes(loaded), [])
