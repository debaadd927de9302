"""A small model that answers alone where it may be trusted to, with a bound on how often that changes the answer.

bound         exact binomial bounds; the threshold that stays valid though chosen from the same data
confidence    how sure the small model was of an answer
measure       run both models over prompts and count
calibration   the counts as a file
cascade       both models as one
audit, drift  is the promise still kept?
handed        the small answer as the large model's first draft
"""

from .calibration import Calibration, load_calibration
from .cascade import Cascade
from .confidence import Signal
from .drift import DriftAlarm
from .measure import calibrate
from .outcome import CascadeOutput, CascadeStats, DriftWarning, Reason

__all__ = [
    "Calibration",
    "Cascade",
    "CascadeOutput",
    "CascadeStats",
    "DriftAlarm",
    "DriftWarning",
    "Reason",
    "Signal",
    "calibrate",
    "load_calibration",
]
