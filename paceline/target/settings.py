"""How the passes of a runner are computed, as it was measured for them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PassSettings:
    """How passes are computed, see `numerics`.

    invariant: the bits of a row do not depend on what shares its pass. Native passes have this property by
        construction. In torch, passes are padded to a multiple of `row_multiple` rows, and a tree is computed as the
        chains it consists of.
    can_fuse_prefill: whether the last chunk of a prompt and the first draft may share a pass. False where invariance
        was measured without such passes.
    """

    invariant: bool
    row_multiple: int = 1
    can_fuse_prefill: bool = True
