"""The speed limit of a machine: its memory bandwidth, and the bytes that a decoding pass must read.

Decoding one token reads every weight once, so a step takes at least the floor, `weight_bytes / read_bandwidth` seconds.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from ..hf.experts import num_chosen_of, num_experts_of
from ..system.hardware import available_memory
from ..target import LoadedModel

_CPU_BYTES, _CUDA_BYTES = 512 << 20, 2 << 30  # several times the caches
_LEAST_BYTES = 64 << 20
_GROWN = 1.15  # a pass counts as slower than one row's from here on; less is noise


@torch.inference_mode()
def read_bandwidth(device: torch.device | str = "cpu", seconds: float = 0.6) -> float:
    """Bytes per second at which memory can be read at best: on CPU with torch's current number of threads.

    The best of several sums over a buffer larger than the caches, for about `seconds`; on CUDA the best of sums and
    copies, which read and write. On a busy machine it is the bandwidth that remains.
    """
    buffer = _buffer(torch.device(device))
    # Sums of int64 add once for eight bytes and never round: no other operation read faster. Products with a vector
    # reach a third of it, and the maximum of floats, which looks for NaN, three quarters.
    best = buffer.nbytes / _fastest("buffer.sum()", buffer, seconds)
    if not buffer.is_cuda:
        return best
    half = buffer.numel() // 2
    copied = _fastest(f"buffer[:{half}].copy_(buffer[{half} : {2 * half}])", buffer, seconds)
    return max(best, 2 * half * buffer.element_size() / copied)


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a pass over one token reads, in whatever format the layers hold them.

    The output head counts, even if it is tied to the embedding; embedding and position tables do not. Of mixture-of-
    experts layers, the experts that one token is routed to count.
    """
    routed = _routed_share(loaded)
    sizes: dict[object, float] = {}
    for name, module in loaded.model.named_modules():
        share = routed if "experts" in name.split(".") else 1.0
        for tensor in _read_by(module):
            sizes.setdefault(_identity(tensor), tensor.nbytes * share)
    return round(sum(sizes.values()))


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a pass by its rows, and the floor: the time that reading the weights takes at `bandwidth`."""

    weight_bytes: int
    bandwidth: float
    seconds: Mapping[int, float]

    @property
    def floor(self) -> float:
        """The least seconds of a pass."""
        return self.weight_bytes / self.bandwidth

    @property
    def floor_fraction(self) -> float:
        """Part of a plain step that is reading weights; 1 is the machine's limit."""
        return self.floor / self.seconds[1]

    @property
    def flat_rows(self) -> int:
        """The most measured rows up to which a pass takes about as long as one row's."""
        return max(takewhile(lambda rows: self.seconds[rows] <= _GROWN * self.seconds[1], sorted(self.seconds)))

    def at(self, rows: int) -> float:
        """Seconds of a pass over `rows`: linear between the measured counts, and beyond the last two."""
        known = sorted(self.seconds)
        if rows in self.seconds or len(known) < 2:
            return self.seconds.get(rows, self.seconds[known[0]])
        above = min(max(bisect_left(known, rows), 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (rows - low)

    def dearest_draft(self, num_tokens: int, acceptance: float) -> float:
        """The most seconds per drafted token for which a draft of `num_tokens` pays; negative: not even a free one.

        A round then yields E tokens (`tokens_per_round`) and takes num_tokens * cost + T(num_tokens + 1), where plain
        decoding takes E * T(1).
        """
        gain = tokens_per_round(num_tokens, acceptance) * self.seconds[1] - self.at(num_tokens + 1)
        return gain / num_tokens

    def speedup(self, num_tokens: int, acceptance: float, draft_seconds: float = 0.0) -> float:
        """Over plain decoding, of drafts that cost `draft_seconds` a token."""
        spent = num_tokens * draft_seconds + self.at(num_tokens + 1)
        return tokens_per_round(num_tokens, acceptance) * self.seconds[1] / spent

    def least_acceptance(self, num_tokens: int) -> float | None:
        """The acceptance from which a free draft pays, to 0.001; None if even a perfect one does not."""
        shares = (thousandth / 1000 for thousandth in range(1001))
        return next((share for share in shares if self.dearest_draft(num_tokens, share) >= 0), None)


def tokens_per_round(num_tokens: int, acceptance: float) -> float:
    """Expected tokens of a round in which each drafted token is accepted with this probability if those before are."""
    return sum(acceptance**i for i in range(num_tokens + 1))


def about_drafts(costs: PassCosts) -> str:
    """A sentence on how fast a draft model must be to pay on this machine."""
    cases = list[str]()
    for num_tokens, acceptance in ((5, 0.8), (3, 0.6)):
        dearest = costs.dearest_draft(num_tokens, acceptance)
        price = f"below {ms(dearest)} a drafted token ({dearest / costs.seconds[1]:.0%} of a plain step)"
        price = price if dearest > 0 else "not even if it took no time"
        cases.append(f"{price} with {num_tokens} tokens at a time, each accepted {acceptance:.0%} of the time")
    return f"A draft model would pay here {'; '.join(cases)}."


def ms(seconds: float) -> str:
    """Milliseconds, for sentences."""
    return f"{1e3 * seconds:.3g} ms"


def _read_by(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that a module itself reads whole in every pass."""
    name = type(module).__name__  # the embeddings of `hf.described` and of blocks are none of torch's
    if isinstance(module, nn.Embedding) or "Embedding" in name or "Rotary" in name:
        return
    yield from module.parameters(recurse=False)
    # Quantised and packed layers hold their weights in buffers; those of bools are masks, which trees do not use.
    yield from (buffer for buffer in module.buffers(recurse=False) if buffer.dtype is not torch.bool)


def _identity(tensor: Tensor) -> object:
    """A key that is equal for two tensors in the same memory."""
    if tensor.is_mkldnn:  # opaque: it has no address to ask for
        return id(tensor)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.device


def _routed_share(loaded: LoadedModel) -> float:
    """The share of the experts that one token is routed to; 1 where there are none or it is unknown."""
    config = loaded.model.config.get_text_config()
    used, of = num_chosen_of(config), num_experts_of(config)
    return min(1.0, used / of) if isinstance(used, int) and isinstance(of, int) and used and of else 1.0


def _buffer(place: torch.device) -> Tensor:
    """A buffer to read: larger than the caches, and at most a quarter of the free memory."""
    size = _CUDA_BYTES if place.type == "cuda" else _CPU_BYTES
    free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else available_memory()
    if free is not None:
        size = max(_LEAST_BYTES, min(size, free // 4))
    # Ones, not zeros: pages that were never written are all the same page of zeros, and that one is in the cache.
    return torch.ones(size // 8, dtype=torch.int64, device=place)


def _fastest(work: str, buffer: Tensor, seconds: float) -> float:
    """Seconds of the fastest run among those of about `seconds`; waits for the device."""
    timer = Timer(work, globals={"buffer": buffer}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=seconds).times)
