"""The slow obvious decoder: no cache, no tree, no draft; the whole text is read again for every token.

It shares the law of a token with the fast path and nothing else; tests hold the fast path against it.
"""

import torch
from torch import nn

from ..core.outputs import Origin
from ..core.request import Sequence
from ..core.tree import TokenTree
from ..runner import LoadedModel, SlotCache
from ..runner.layout import PassLayout
from ..runner.reading import prompt_rows
from ..sampling import target_law
from ..verify import choose


@torch.inference_mode()
def autoregressive(loaded: LoadedModel, seq: Sequence) -> Sequence:
    """Run `seq` to its end, one token at a time; the tower sees each of its pictures once more."""
    vision, half = seq.vision, loaded.vision
    assert vision is None or half is not None, "pictures for a model that takes text alone"
    features = [half.features(image) for image in vision.images] if vision and half else []
    offset = vision.position_delta if vision else half.family.text_offset if half else 0
    embeddings: nn.Module = loaded.model.get_input_embeddings()  # type: ignore[assignment]
    while not seq.is_finished:
        cache = SlotCache(1, len(seq.token_ids))
        starts = cache.begin([cache.allocate()], len(seq.token_ids))
        layout = PassLayout(starts, len(seq.token_ids), None, False, device=loaded.device, offsets=[offset])
        if vision:
            layout.rows = prompt_rows(embeddings, seq.token_ids, 0, vision, features)
        ids = torch.tensor([seq.token_ids], device=loaded.device)
        logits = loaded.forward(ids, layout, cache)[:, -1:]
        law = target_law(logits, [seq], TokenTree.chain([[seq.token_ids[-1]]], loaded.device))
        seeds = torch.tensor([seq.seed], device=loaded.device)
        token = choose(law, seeds, torch.tensor([[len(seq.token_ids)]], device=loaded.device))
        seq.append(int(token[0, 0]), Origin.PLAIN, "")
    return seq
