"""Draft heads: their modules, the folders they are saved in, and the layouts of other engines.

parts       layers, sizes and vocabularies that the modules share
eagle, parallel (Medusa, blockwise), mtp, space, int4_draft     one module each, with its configuration
folder      a head as a folder; which method has which module
card        the model card, from the record of the training
exchange    heads that others published, and ours for other engines
"""

from .eagle import EagleConfig, EagleHead
from .exchange import ENGINES, Exported, export_head, read_published
from .folder import (
    HEADS,
    METHODS,
    Head,
    HeadInfo,
    HeadTarget,
    head_info,
    load_head,
    method_of,
    read_record,
    save_head,
    trained_info,
)
from .int4_draft import Int4Draft, Int4DraftConfig
from .mtp import MtpConfig, MtpHead
from .parallel import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from .space import SpaceAdapter, SpaceConfig

__all__ = [
    "ENGINES", "HEADS", "METHODS", "BlockwiseConfig", "BlockwiseHead", "EagleConfig", "EagleHead", "Exported", "Head",
    "HeadInfo", "HeadTarget", "Int4Draft", "Int4DraftConfig", "MedusaConfig", "MedusaHead", "MtpConfig", "MtpHead",
    "SpaceAdapter", "SpaceConfig", "export_head", "head_info", "load_head", "method_of", "read_published",
    "read_record", "save_head", "trained_info",
]  # fmt: skip
