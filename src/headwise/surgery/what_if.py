"""What a model would lose and gain with fewer heads: quality, latency and KV bytes of pruned and
shared variants beside the original, least important heads first."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import BadInput
from headwise.record import Record
from headwise.statistics.importance import Importance, Projection, head_importance
from headwise.surgery.families import sites
from headwise.surgery.healing import heal
from headwise.surgery.prune import prune_heads
from headwise.surgery.share import share_kv

Say = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Variant:
    """One row. name: "original", "prune 20 %", "1 kv heads", with "+ healed N steps". pruned: the
    share of heads (or key/value groups) really removed. perplexity: e^{mean nats per token} over
    the evaluation windows. prefill_ms: median forward pass of a window; decode_ms: median of a
    token with the cache filled by a window. kv_bytes: cache of one window, from the model's shapes.
    """

    name: str
    pruned: float
    kv_heads: int
    perplexity: float
    prefill_ms: float
    decode_ms: float
    kv_bytes: int
    parameters: int
    healed: int = 0

    def record(self) -> Record:
        values = asdict(self)
        return Record("whatif", {"variant": values.pop("name")}, values)


def importance(
    model: nn.Module, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> Importance:
    """`head_importance` of every attention module of a model whose heads can be changed."""
    return head_importance(
        model,
        {s.name: Projection(s.output, s.heads, s.kv_heads) for s in sites(model)},
        batches,
        loss,
    )


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean nats per predicted token of each window, (B,), from ids (B, N) of a causal model."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    lost = nn.functional.cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none")
    return lost.mean(1)


def least_important(found: Importance, share: float) -> dict[int | str, list[int]]:
    """{layer: units} of the `share` least important heads (groups, where grouped), over all
    layers; every layer keeps its most important one.

    Raises:
        BadInput: the share is not in [0, 1), or would leave some layer empty.
    """
    if not 0 <= share < 1:
        raise BadInput(f"what_if: prune={share} must be a share in [0, 1), such as 0.2")
    ranked = sorted(
        (float(value), name, unit)
        for name, values in found.groups.items()
        for unit, value in enumerate(values)
        if unit != int(values.argmax())
    )
    total = sum(len(v) for v in found.groups.values())
    wanted = round(share * total)
    if wanted > len(ranked):
        raise BadInput(
            f"what_if: prune={share} would remove {wanted} of {total} heads or groups, and each of "
            f"the {len(found.groups)} layers keeps one: at most {len(ranked) / total:.2f}"
        )
    gone: dict[int | str, list[int]] = {}
    for _, name, unit in ranked[:wanted]:
        gone.setdefault(name, []).append(unit)
    return gone


def what_if(
    model: nn.Module,
    ids: Tensor,
    *,
    prune: Sequence[float] = (0.1, 0.2, 0.4),
    kv_heads: Sequence[int] = (),
    context: int = 512,
    windows: int = 16,
    heal_steps: int = 0,
    by: Any = "mean",
    say: Say = lambda done, total, line: None,
) -> list[Variant]:
    """Measure variants of a causal language model on token ids (N,); the original comes first.

    Windows of `context` tokens are taken at equal distances from the text: every other one is for
    evaluation (`windows` of them), the rest for importance and healing, so no variant is measured
    on what it was chosen by. One window's logits are held at a time. The model is left as it is.

    Raises:
        BadInput: no causal language model, too little text, a share or count that does not fit.
    """
    config: Any = getattr(model, "config", None)
    if config is None or getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise BadInput(f"what_if: {type(model).__name__} is no causal language model")
    if context < 2 or windows < 1 or heal_steps < 0:
        raise BadInput("what_if: context must be at least 2, windows 1, heal steps 0")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and context > limit:
        raise BadInput(f"what_if: context={context} is more than the model's {limit} positions")
    have = len(ids) // context
    if have < 2 * windows:
        raise BadInput(
            f"what_if: the text has {len(ids):,} tokens and {2 * windows} windows of {context} "
            f"need {2 * windows * context:,}: give more text, or fewer or shorter windows"
        )
    for share in prune:
        if not 0 <= share < 1:
            raise BadInput(f"what_if: prune={share} must be a share in [0, 1), such as 0.2")
    device = next(model.parameters()).device
    pieces = ids[: have * context].reshape(have, 1, context).to(device)
    at = [i * have // (2 * windows) for i in range(2 * windows)]
    test = [pieces[i] for i in at[::2]]
    rest = [pieces[i] for i in range(have) if i not in set(at[::2])]
    calibration = [pieces[i] for i in at[1::2]][: max(1, windows // 2)]
    plans: list[tuple[str, Callable[[], nn.Module]]] = [("original", lambda: model)]
    for count in kv_heads:
        share_check = [s.kv_heads % count if count > 0 else 1 for s in sites(model)]
        if any(share_check):
            raise BadInput(f"what_if: kv_heads={count} does not divide every layer's kv heads")
        plans.append(
            (f"{count} kv head{'s' * (count > 1)}", lambda c=count: share_kv(model, c, by=by))  # type: ignore[misc]
        )
    total = (len(plans) + len(prune)) * (2 if heal_steps else 1) + 1
    say(0, total, f"importance over {len(calibration)} windows")
    if prune:
        found = importance(model, calibration, token_losses)
        for share in sorted(prune):
            gone = least_important(found, share)
            plans.append((f"prune {share:.0%}", lambda g=gone: prune_heads(model, g)))  # type: ignore[misc]
    units = sum(s.kv_heads for s in sites(model))
    rows: list[Variant] = []
    for index, (name, make) in enumerate(plans):
        say(len(rows) + 1, total, f"measuring {name}")
        variant = make()
        pruned = 1 - sum(s.kv_heads for s in sites(variant)) / units if name[:5] == "prune" else 0.0
        rows.append(_measure(variant, name, pruned, test))
        if heal_steps:
            say(len(rows) + 1, total, f"healing {name}")
            healed = heal(variant, rest, heal_steps, copy_first=index == 0)
            rows.append(_measure(healed, f"{name} + healed", pruned, test, heal_steps))
    say(total, total, "done")
    return rows


def _measure(
    model: nn.Module, name: str, pruned: float, test: Sequence[Tensor], healed: int = 0
) -> Variant:
    was = model.training
    model.eval()
    losses, times = [], []
    with torch.inference_mode():
        for window in test:
            start = time.perf_counter()
            losses.append(float(token_losses(model, window)))
            times.append(time.perf_counter() - start)
        decode = _decode(model, test[0])
    model.train(was)
    found = sites(model)
    size = next(model.parameters()).element_size()
    held = sum(s.kv_heads * (s.head_dim + s.value_dim) for s in found)
    return Variant(
        name,
        pruned,
        max(s.kv_heads for s in found),
        math.exp(statistics.fmean(losses)) if statistics.fmean(losses) < 700 else math.inf,
        1e3 * statistics.median(times),
        1e3 * decode,
        held * size * test[0].shape[1],
        sum(p.numel() for p in model.parameters()),
        healed,
    )


def _decode(model: nn.Module, window: Tensor, steps: int = 8) -> float:
    """Median seconds of a token, behind a prompt that leaves room for the steps."""
    prompt = window[:, : max(1, window.shape[1] - steps)]
    # transformers renames the keyword, and warns of the old one.
    word = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    first = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    cache = getattr(first, word) if hasattr(first, word) else first.past_key_values
    times = []
    for _ in range(min(steps, window.shape[1] - 1)):
        start = time.perf_counter()
        model(input_ids=window[:, -1:], use_cache=True, **{word: cache})
        times.append(time.perf_counter() - start)
    return statistics.median(times)
