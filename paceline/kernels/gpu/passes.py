"""A pass on a GPU: the structures of `abi.h` over tensors, computed by the kernels of this folder.

What differs between two passes over trees of the same size is in buffers, so that a pass can be replayed as a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from .attention import attend
from .products import finish, multiply
from .rows import embed, plan, rotate, settle
from .structures import Layer, Matrix, Model, Norm, Pass


@dataclass(eq=False)
class Inputs:
    """What a pass reads besides the cache, on the device.

    ids, parents: int32 [B, N] and [B, old + N]. starts, slots, sizes: int32 [B]. places: see `rows.plan`.
    """

    ids: Tensor
    starts: Tensor
    slots: Tensor
    sizes: Tensor
    places: Tensor
    paths: Tensor | None
    ends: Tensor | None
    firsts: Tensor | None


def run(model: Model, step: Pass) -> None:
    """Run a pass. Raises IndexError for unknown tokens."""
    device = step.keys[0].device
    inputs = _inputs(model, step, device)
    _compute(model, step, inputs)


def _inputs(model: Model, step: Pass, device: torch.device) -> Inputs:
    batch, nodes, old = step.batch, step.nodes, step.old
    is_chain = step.parents is None
    ids = step.ids if step.ids is not None else [0] * (batch * nodes)
    numbers = [*step.starts, *step.slots, *(step.offsets or [0] * batch), *(step.sizes or [nodes] * batch)]
    listed = [part for part in (ids, step.parents) if part is not None]
    host = [part if isinstance(part, list) else part.flatten().tolist() for part in listed]
    if (
        step.ids is not None
        and model.embeddings is not None
        and not 0 <= min(host[0]) <= max(host[0]) < model.vocabulary
    ):
        raise IndexError(f"a token has no embedding: ids are below {model.vocabulary}")
    for part in host:
        numbers += part
    staged = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    sizes = [batch] * 4 + [batch * nodes] + ([] if is_chain else [batch * (old + nodes)])
    starts, slots, offsets, counts, ids, *parents = staged.split(sizes)
    places, paths = plan(starts, slots, offsets, parents[0] if parents else None, nodes, old, step.max_position)
    move = lambda tensor: None if tensor is None else tensor.to(device).flatten()  # noqa: E731
    return Inputs(ids, starts, slots, counts, places, paths, move(step.block_ends), move(step.block_firsts))


def _compute(model: Model, step: Pass, inputs: Inputs) -> None:
    rows, hidden, dtype = step.batch * step.nodes, model.hidden, step.keys[0].dtype
    device = step.keys[0].device
    stream = torch.empty(rows, hidden, device=device)
    wants_end = (
        step.logits is not None or step.last_hidden is not None or bool(step.states and step.states[-1] is not None)
    )
    longest = max(step.starts) + step.old + step.nodes
    if step.rows is not None:
        stream.copy_(step.rows.reshape(rows, hidden))
    elif step.inputs is not None:
        _project(model, step, inputs, stream, dtype)
    else:
        embed(model.embeddings, inputs.ids, stream, model.embedding_scale)
    normed = torch.empty(rows, hidden, dtype=dtype, device=device)
    for index, layer in enumerate(model.layers):
        ends = step.kv_only or (index == model.num_layers - 1 and not wants_end)
        _keep(step, inputs, index, stream)
        if layer.hidden_norm.kind:
            x = torch.empty(rows, 2 * hidden, dtype=dtype, device=device)
            embedded = torch.empty_like(stream)
            embed(model.embeddings, inputs.ids, embedded, model.embedding_scale)
            settle(embedded, following=layer.input, out=x[:, :hidden])
            settle(
                stream,
                following=layer.hidden_norm,
                out=x[:, hidden:],
                last=stream if layer.norm_before_residual else None,
            )
        else:
            x = settle(stream, following=layer.input, out=normed)
        if layer.q.data is not None:
            sums = multiply(x, [matrix for matrix in (layer.q, layer.k, layer.v) if matrix.data is not None])
            keys, values = step.keys[index - layer.shared_kv], step.values[index - layer.shared_kv]
            q, gates = rotate(layer, sums, inputs.places, keys, values, *_tables(step, layer), step.max_position < 0)
            if ends:
                return_early = index == model.num_layers - 1
                if return_early:
                    return
                continue
            wide = bool(layer.window) or not step.windowed_blocks
            out = attend(
                layer, q, gates, keys, values, inputs.starts, inputs.slots, inputs.places, inputs.paths, longest,
                inputs.ends if wide else None, inputs.firsts if wide else None,
            )  # fmt: skip
            _add(stream, layer.o, out, layer.after_attention, layer.attention_times)
        if layer.up.data is None:
            continue
        x = settle(stream, following=layer.before_mlp, out=normed)
        gate = None if layer.gate.data is None else layer.gate
        x = finish(x, layer.up, gate, layer.activation, gate_times=layer.gate_times)
        _add(stream, layer.down, x, layer.after_mlp, layer.mlp_times, layer.scalar or 1.0)
        if step.deepstack and step.deepstack[index] is not None:
            settle(stream, more=step.deepstack[index])
    if not wants_end:
        return
    if step.last_hidden is not None:
        step.last_hidden.view(rows, hidden).copy_(stream)
    last = torch.empty_like(stream)
    settle(stream, following=model.final_norm, out=normed, last=last)
    _keep(step, inputs, model.num_layers, last)
    if step.logits is None:
        return
    some = normed.view(step.batch, step.nodes, hidden)[:, step.nodes - step.head_rows :].reshape(-1, hidden)
    scale, cap = model.logit_scale, model.logit_softcap
    finish(some, model.head, out=step.logits.view(len(some), -1), times=scale, softcap=cap)
    if step.sizes is not None:  # what pads a tree has no logits
        nodes = torch.arange(step.nodes - step.head_rows, step.nodes, device=device)
        step.logits.masked_fill_((nodes >= inputs.sizes[:, None])[..., None], 0.0)
    if step.top:
        _find_top(step)


def _add(stream: Tensor, matrix: Matrix, x: Tensor, post: Norm, times: float, scalar: float = 1.0) -> None:
    settle(stream, multiply(x, [matrix]), matrix.bias, post, times=times, scalar=scalar)


def _project(model: Model, step: Pass, inputs: Inputs, stream: Tensor, dtype: torch.dtype) -> None:
    """The rows that the first layer reads, from states, and with `projects_pairs` the embeddings of tokens before them."""
    matrix, hidden = model.project, model.hidden
    before = hidden if model.projects_pairs else 0
    x = torch.empty(len(stream), matrix.ins, dtype=dtype, device=stream.device)
    if before:
        embedded = torch.empty_like(stream)
        embed(model.embeddings, inputs.ids, embedded, model.embedding_scale)
        settle(embedded, following=model.embedding_norm, out=x[:, :hidden])
    given = step.inputs.reshape(len(stream), -1).float()
    settle(given, following=model.state_norm, out=x[:, before:])
    finish(x, matrix, out=stream)


def _tables(step: Pass, layer: Layer) -> tuple[Tensor, Tensor]:
    if not layer.rotary_dim:
        return step.keys[0], step.keys[0]
    return step.cos[layer.rope], step.sin[layer.rope]


def _keep(step: Pass, inputs: Inputs, index: int, rows: Tensor) -> None:
    """Store a hidden state in the columns of the pass."""
    if step.states and step.states[index] is not None:
        slots, columns = inputs.places[:, 0].long(), inputs.places[:, 1].long()
        step.states[index][slots, columns] = rows.to(step.states[index].dtype)


def _find_top(step: Pass) -> None:
    """The largest of the logits, with noise added to them, and their log-probabilities."""
    logits = step.logits if step.noise is None else step.logits + step.noise[:, None]
    lowest = torch.finfo(torch.float32).min / 4
    logits = torch.where(logits < torch.inf, logits, lowest)
    values, columns = logits.topk(step.top, -1)
    step.top_ids.copy_(columns)
    step.top_logps.copy_(values - logits.logsumexp(-1, keepdim=True))
