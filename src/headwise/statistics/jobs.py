"""From an attention call to jobs for the inner loop, one a batch element; arguments are checked."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.call import AttentionCall
from headwise.masks import Mask
from headwise.statistics.interface import Job
from headwise.statistics.sight import Sight, visible_pairs
from headwise.statistics.tokens import Matches

# Positions further apart than this are not positions of tokens: distances are counted one by one.
LARGEST_SPREAD = 1 << 24


def prepare(
    call: AttentionCall,
    options: dict[str, Tensor | None],
    *,
    declared: Mask | None,
    block: tuple[int, int] = (1, 1),
    top: int = 0,
    pairs: bool = True,
    tile: tuple[int, int] | None = None,
) -> list[Job]:
    """One job a batch element. options: the tensors that `head_statistics` takes, by name.

    Raises:
        ValueError: a shape or a number that does not fit the call.
    """
    call = call.detach()
    given = _check(call, options)
    sizes = {
        "batch": call.batch,
        "heads": call.num_heads,
        "queries": call.query_length,
        "keys": call.key_length,
    }
    mask = visible_pairs(call)
    stated = None if declared is None else declared.compile(**sizes, device=call.query.device)
    jobs = []
    for item in range(call.batch):
        part = {name: None if x is None else x[item] for name, x in given.items()}
        sight = Sight(mask, item, part["query_rows"])
        claim = None if stated is None else Sight(stated, item, None)
        jobs.append(_job(call, item, sight, claim, part, block, top, pairs, tile))
    return jobs


def _check(call: AttentionCall, options: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The optional tensors with a batch axis, on the call's device; errors name both shapes."""
    batch, length, keys = call.batch, call.query_length, call.key_length
    if batch == 0:
        raise ValueError("head_statistics: the call holds no batch element, so nothing to measure")
    if (options["query_positions"] is None) != (options["key_positions"] is None):
        raise ValueError(
            "head_statistics: give query_positions and key_positions together, a "
            "distance needs both"
        )
    if options["token_ids"] is not None and length > keys:
        raise ValueError(
            f"head_statistics: token_ids name the keys, and {length} queries cannot be the last of "
            f"{keys} keys; leave token_ids out for cross-attention"
        )
    wanted = {
        "lse": (batch, call.num_heads, length),
        "token_ids": (batch, keys),
        "query_rows": (batch, length),
        "query_positions": (batch, length),
        "key_positions": (batch, keys),
    }
    out: dict[str, Tensor | None] = {}
    for name, shape in wanted.items():
        tensor = options[name]
        if tensor is None:
            out[name] = None
            continue
        if tensor.dim() == 1 and len(shape) == 2:
            tensor = tensor[None].expand(batch, -1)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"head_statistics: {name} must have shape {shape}, got {tuple(tensor.shape)}"
            )
        if name == "query_rows" and tensor.dtype != torch.bool:
            raise ValueError(
                f"head_statistics: query_rows is bool, True for rows that count; got {tensor.dtype}"
            )
        if name.endswith("positions") or name == "token_ids":
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                raise ValueError(f"head_statistics: {name} are whole numbers, got {tensor.dtype}")
            tensor = tensor.long()
        out[name] = tensor.detach().to(call.query.device)
    return out


def _job(
    call: AttentionCall,
    item: int,
    sight: Sight,
    declared: Sight | None,
    part: dict[str, Tensor | None],
    block: tuple[int, int],
    top: int,
    pairs: bool,
    tile: tuple[int, int] | None,
) -> Job:
    length, keys, device = call.query_length, call.key_length, call.query.device
    used = sight.used_keys()
    query_at, key_at = part["query_positions"], part["key_positions"]
    at: int | None = keys - length
    if query_at is None or key_at is None:
        query_at = torch.arange(length, device=device) + (keys - length)
        key_at = torch.arange(keys, device=device)
        first = int(used.long().argmax()) if keys else 0
    else:
        at = _constant_gap(query_at, key_at, sight.active.any(0), used)
        first = 0
        if at is None:
            # Positions of idle rows and keys are free; pin them, so that they span no range.
            query_at = _pinned(query_at, sight.active.any(0))
            key_at = _pinned(key_at, used)
            spread = int(query_at.max() - query_at.min() + key_at.max() - key_at.min())
            if spread > LARGEST_SPREAD:
                raise ValueError(
                    f"head_statistics: positions span {spread}, more than {LARGEST_SPREAD}; "
                    "count them in tokens"
                )
    places = torch.arange(4, device=device) + first
    is_place = (key_at[:, None] == places) & used[:, None]  # (S, 4)
    bias = call.bias
    if bias is not None:
        bias = bias if bias.dim() == 4 else bias[None, None]
        bias = bias[item if bias.shape[0] > 1 else 0].to(call.accumulate_dtype)
    ids = part["token_ids"]
    return Job(
        query=call.query[item].to(call.accumulate_dtype),
        key=call.key[item].to(call.accumulate_dtype),
        scale=call.scale_value,
        softcap=call.softcap,
        bias=bias,
        sinks=call.sinks,
        sight=sight,
        lse=part["lse"],
        at=at,
        query_at=query_at,
        key_at=key_at,
        used=used,
        places=places,
        place_of_key=torch.where(is_place.any(-1), is_place.long().argmax(-1), -1),
        matches=None if ids is None else Matches(ids, used, length),
        declared=declared,
        block=block,
        top=top,
        pairs=pairs,
        tile=tile,
    )


def _constant_gap(query_at: Tensor, key_at: Tensor, rows: Tensor, keys: Tensor) -> int | None:
    """position(query i) − position(key j) − (i − j), where it is one number for all that count."""
    starts = []
    for at, counted in ((query_at, rows), (key_at, keys)):
        start = (at - torch.arange(at.shape[0], device=at.device))[counted]
        if not start.numel():
            return 0
        if bool((start != start[0]).any()):
            return None
        starts.append(int(start[0]))
    return starts[0] - starts[1]


def _pinned(at: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, at, at[counted][0])
