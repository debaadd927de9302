"""A small model that answers alone where it is confident, with a bound on how often that changes the answer.

cascade      both models as one
calibration  what was counted, as a file, and the threshold that follows
measure      run both models over prompts, count, and draw the risk-coverage plot
bound        exact binomial bounds; the threshold that stays valid though chosen from the same data
audit        is the promise still kept?
predicted    the small answer as the large model's first draft
"""

from .audit import DriftAlarm
from .calibration import Calibration, Signal, load_calibration
from .cascade import Cascade, CascadeOutput, CascadeStats, DriftWarning, Reason
from .measure import calibrate

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
