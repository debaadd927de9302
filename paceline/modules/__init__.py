"""What Paceline trains: small networks that read the target's hidden states and foresee its tokens."""

from .eagle import EagleConfig, EagleHead
from .heads import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from .mtp import MtpConfig, MtpHead

__all__ = [
    "BlockwiseConfig",
    "BlockwiseHead",
    "EagleConfig",
    "EagleHead",
    "MedusaConfig",
    "MedusaHead",
    "MtpConfig",
    "MtpHead",
]
