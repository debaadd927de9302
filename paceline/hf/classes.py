"""Classes of transformers for annotations that are read at run time: to import the classes themselves takes seconds."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers.processing_utils import ProcessorMixin as ProcessorMixin
else:

    def _processor(value: Any) -> Any:
        from transformers.processing_utils import ProcessorMixin

        if not isinstance(value, ProcessorMixin):
            raise ValueError("a processor of transformers, or None")
        return value

    PreTrainedModel, ProcessorMixin = nn.Module, Annotated[Any, AfterValidator(_processor)]
