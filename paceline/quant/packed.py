"""Linear layers whose bfloat16 weights are reordered once for oneDNN's kernels.

`F.linear` reads a plain weight and reorders it in every call; with few rows that costs two to three times the product
itself. The results are bit for bit those of `F.linear`.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A bfloat16 linear layer on CPU in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed: Tensor
        self.register_buffer(
            "packed", torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach()), persistent=False
        )
        self.bias = linear.bias

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """True iff this machine has the kernels for this layer."""
        weight = linear.weight
        return (
            weight.device.type == "cpu"
            and weight.dtype is torch.bfloat16
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in], made anew on every read."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` that fits, freeing the plain weights that nothing else holds; returns how many."""
    count = 0
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and PackedLinear.fits(module):
            model.set_submodule(name, PackedLinear(module))
            count += 1
    return count
