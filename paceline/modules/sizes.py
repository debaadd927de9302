"""Sizes that a module's configuration may hold: no larger than any model's, since each claims time or memory."""

from typing import Annotated

from pydantic import Field

from ..errors import ConfigError
from ..schema import Many

Size = Annotated[int, Field(ge=1, le=1 << 20)]
"""A width."""
Count = Annotated[int, Field(ge=1, le=512)]
"""Modules in a row."""
Vocabulary = Annotated[int, Field(ge=1, le=1 << 24)]
"""Tokens."""
Rank = Annotated[int, Field(ge=0, le=1 << 16)]
"""Of factors; 0: none."""
States = Annotated[Many[Annotated[int, Field(ge=0, le=512)]], Field(min_length=1)]
"""Hidden states of the target, counted as transformers does."""
Linears = Annotated[Many[str], Field(max_length=64)]
"""Linear layers of a decoder layer, as transformers names them."""
Shapes = Many[tuple[Size, Size]]
"""(outputs, inputs) of each."""
Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""


def check_heads(num_attention_heads: int, num_key_value_heads: int, head_dim: int) -> None:
    """Raise `ConfigError` for heads of attention that cannot share keys, or whose positions do not come in pairs."""
    if num_attention_heads % num_key_value_heads or head_dim % 2:
        raise ConfigError(
            "the attention of this head does not work out",
            got=f"{num_attention_heads} heads of {head_dim} over {num_key_value_heads} of keys",
            expected="as many for each of the keys, of an even size",
        )


def check_vocabulary(draft_vocab_size: int, vocab_size: int) -> None:
    """Raise `ConfigError` for a draft vocabulary that is larger than the target's."""
    if draft_vocab_size > vocab_size:
        raise ConfigError(
            "draft_vocab_size is larger than the vocabulary", got=draft_vocab_size, expected=f"at most {vocab_size}"
        )
