"""What Paceline trains: small networks that foresee the target's tokens."""

from .eagle import EagleConfig, EagleHead
from .heads import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from .mtp import MtpConfig, MtpHead
from .space import SpaceAdapter, SpaceConfig

__all__ = [
    "BlockwiseConfig",
    "BlockwiseHead",
    "EagleConfig",
    "EagleHead",
    "MedusaConfig",
    "MedusaHead",
    "MtpConfig",
    "MtpHead",
    "SpaceAdapter",
    "SpaceConfig",
]
