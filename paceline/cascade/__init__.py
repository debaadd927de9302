"""A small model that answers alone where it is confident, with a bound on how often that changes the answer."""

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
