"""Classes of transformers for annotations that are read at run time: to import the classes themselves takes seconds."""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers.processing_utils import ProcessorMixin as ProcessorMixin
else:
    PreTrainedModel, ProcessorMixin = nn.Module, object
