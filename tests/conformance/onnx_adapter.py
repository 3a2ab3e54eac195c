"""headwise as an ONNX backend: the operators Attention and RotaryEmbedding, and nothing else.

The adapter only translates names; every number comes out of headwise. It follows the operators'
specification (onnx.ai, operators Attention-23, -24, -25 and RotaryEmbedding-23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx
import torch
from torch import Tensor

import headwise
from headwise.reference import attention_steps, merge_heads, split_heads

# What qk_matmul_output_mode 0 to 3 asks for, among the steps of the definition.
STEPS = ("scaled", "capped", "masked", "weights")


class Refused(Exception):
    """headwise does not compute this node; the message says why."""


def to_torch(array: np.ndarray) -> Tensor:
    """numpy has no bfloat16 of its own; ml_dtypes' has torch's bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


class Node:
    """A model of one node, ready to run; ONNX calls this a BackendRep."""

    def __init__(self, model: onnx.ModelProto, backend: str | None = None) -> None:
        (self.node,) = model.graph.node
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}
        self.backend = backend
        if self.node.op_type not in OPERATORS:
            raise Refused(f"headwise has no operator {self.node.op_type}")

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The node's outputs that the model names, in its order."""
        given = iter(inputs)
        # An omitted optional input keeps its place, with an empty name.
        tensors = [to_torch(next(given)) if name else None for name in self.node.input]
        outputs = OPERATORS[self.node.op_type](self.attributes, self.backend, *tensors)
        return [to_numpy(o) for name, o in zip(self.node.output, outputs, strict=False) if name]


def prepare(model: onnx.ModelProto, backend: str | None = None) -> Node:
    """`onnx.backend.base.Backend.prepare`, with one of headwise's backends by name."""
    return Node(model, backend)


def attention(
    attributes: dict,
    backend: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grid: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Y, present_key, present_value, qk_matmul_output."""
    joined = query.dim() == 3
    if joined:
        query = split_heads(query, attributes["q_num_heads"])
        key, value = (split_heads(x, attributes["kv_num_heads"]) for x in (key, value))
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = _append(past_key, past_value, key, value)
    # Where query 0 stands among the keys: after the cached ones, whoever keeps the cache.
    offset: int | Tensor = past if nonpad is None else nonpad - query.shape[2]

    mask: headwise.Mask = headwise.everything()
    if attributes.get("is_causal", 0):
        mask &= headwise.causal(offset=offset)
    sides = {side: attributes.get(f"{side}_window_size", -1) for side in ("left", "right")}
    bounds = {side: size for side, size in sides.items() if size != -1}
    if bounds:
        mask &= headwise.window(**bounds, offset=offset)
    if nonpad is not None:
        mask &= headwise.padding(lengths=nonpad, side="right")
    bias = None
    if grid is not None:
        grid = _over_scores(grid, key.shape[2])
        if grid.dtype == torch.bool:
            mask &= headwise.keep(grid)
        else:
            bias = grid

    dtype = query.dtype
    # headwise's softmax is in float32 at least, so only a wish for float64 asks for more.
    if attributes.get("softmax_precision") == onnx.TensorProto.DOUBLE:
        dtype = torch.float64
    call = headwise.AttentionCall(
        *(x.to(dtype) for x in (query, key, value)),
        mask,
        None if bias is None else bias.to(dtype),
        attributes.get("scale"),
        attributes.get("softcap", 0.0) or None,
    )
    output = headwise.attention(
        call.query,
        call.key,
        call.value,
        call.mask,
        bias=call.bias,
        scale=call.scale,
        softcap=call.softcap,
        backend=backend,
    )
    step = attention_steps(call)[STEPS[attributes.get("qk_matmul_output_mode", 0)]]
    output, step = output.to(query.dtype), step.to(query.dtype)
    return merge_heads(output) if joined else output, key, value, step


def _append(
    past_key: Tensor, past_value: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """The new keys and values after the cached ones, by headwise's own cache."""
    batch, heads, past, width = past_key.shape
    cache = headwise.KVCache(
        batch, heads, past + key.shape[2], width, past_value.shape[3], dtype=key.dtype
    )
    cache.append(past_key, past_value)
    key, value, _, _ = cache.append(key, value)
    return key, value


def _over_scores(grid: Tensor, keys: int) -> Tensor:
    """A mask of any rank as (B, H, L, S): axes are added on the left, and missing keys hidden."""
    grid = grid.reshape((1,) * (4 - grid.dim()) + tuple(grid.shape))
    hidden = False if grid.dtype == torch.bool else -torch.inf
    return torch.nn.functional.pad(grid, (0, keys - grid.shape[-1]), value=hidden)


def rotary(
    attributes: dict,
    backend: str | None,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
) -> tuple[Tensor]:
    """RotaryEmbedding. The tables come from the node, so `Rotary` only turns."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    turns = headwise.Rotary(
        dim=attributes.get("rotary_embedding_dim", 0) or None,
        interleaved=bool(attributes.get("interleaved", 0)),
    )
    joined = x.dim() == 3
    if joined:
        x = split_heads(x, attributes["num_heads"])
    if 2 * cos.shape[-1] != turns.rotated(x.shape[-1]):
        raise Refused(f"the table turns {2 * cos.shape[-1]} features, the node says {turns}")
    turned = turns.turn(x, cos[:, None], sin[:, None])
    return (merge_heads(turned) if joined else turned,)


OPERATORS: dict[str, Callable] = {"Attention": attention, "RotaryEmbedding": rotary}
