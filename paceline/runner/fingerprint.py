"""Which model is this? The hash of its checkpoint, whatever became of its layers since.

What is trained for one model (a head) is of use for that model alone, and a name tells nothing: fine-tunes keep it.
Rounding to int8 or int4 keeps the fingerprint of what was rounded: it is still that model, only less precise.
"""

from torch import nn
from transformers import PreTrainedModel

from ..hf.checkpoint_hash import hash_checkpoint

_KEPT = "_paceline_fingerprint"


def fingerprint(model: PreTrainedModel) -> str:
    """`hash_checkpoint` of a model, in hexadecimal.

    Computed while the layers are still those of transformers; a module tree in which they were fused, packed or
    quantised since keeps what `remember` noted.
    """
    known = vars(model).get(_KEPT)
    if isinstance(known, str) and _is_changed(model):
        return known
    return hash_checkpoint(model.config, model.state_dict())


def remember(model: PreTrainedModel, value: str) -> None:
    """Note the fingerprint on a module tree of ours, whose layers are about to be replaced; copies of it keep it."""
    vars(model)[_KEPT] = value


def _is_changed(model: nn.Module) -> bool:
    """Whether layers of ours stand in the place of the model's own."""
    ours = __name__.partition(".")[0] + "."
    return any(type(module).__module__.startswith(ours) for module in model.modules())
