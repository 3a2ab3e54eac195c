"""The faults: each class differs from a correct model in one method, and says how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import models as sound


class InvertedMask(sound.Decoder):
    """A mask that says True for hidden, read as True for visible."""

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        seen = super().mask(length, keys, real)
        assert seen is not None
        return ~seen


class OffByOne(sound.Decoder):
    """triu(diagonal=2) hides the key after next, and lets the next one through."""

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        hidden = torch.ones(length, keys, dtype=torch.bool).triu(diagonal=keys - length + 2)
        seen = ~hidden[None, None]
        return seen if real is None else seen & real[:, None, None, :].bool()


class LeaksWithoutPaddingMask(sound.Decoder):
    """The causal mask is only made where there is a padding mask to join it to."""

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        return None if real is None else super().mask(length, keys, real)


class LeaksInSdpa(sound.Backends):
    """The fused branch forgets the mask."""

    def fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class RotaryOffsetLost(sound.Decoder):
    """Positions start from 0 again with each call."""

    def positions(self, ids: Tensor, real: Tensor | None, start: int) -> Tensor:
        return super().positions(ids, None if real is None else real[:, start:], 0)


class LearnedOffsetLost(sound.LearnedDecoder):
    """The same fault with learned positions."""

    def positions(self, ids: Tensor, real: Tensor | None, start: int) -> Tensor:
        return super().positions(ids, None if real is None else real[:, start:], 0)


class TopLeftCausal(sound.Decoder):
    """SDPA's is_causal with a cache: query 0 of a step sees key 0 only."""

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        return None if real is None else super().mask(length, keys, real)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)


class CacheOverwrites(sound.Decoder):
    """New keys are written one slot too early, over the newest of the cached ones."""

    def remember(self, past: tuple | None, key: Tensor, value: Tensor) -> tuple[tuple, tuple]:
        if past is None:
            return super().remember(past, key, value)
        both = []
        for old, new in zip(past, (key, value), strict=True):
            buffer = F.pad(old, (0, 0, 0, new.shape[2]))
            buffer[:, :, old.shape[2] - 1 : -1] = new
            both.append(buffer)
        return (both[0], both[1]), (both[0], both[1])


class CacheDropsNewest(sound.Decoder):
    """A step attends to the cache as it was before its own keys were written."""

    def remember(self, past: tuple | None, key: Tensor, value: Tensor) -> tuple[tuple, tuple]:
        _, stored = super().remember(past, key, value)
        return (stored if past is None else past), stored

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(
            query, key, value, None if mask is None else mask[..., : key.shape[2]]
        )


class PaddingForgottenInDecode(sound.Decoder):
    """A step of one token passes no mask, so it sees the padding in the cache."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value, None if query.shape[2] == 1 else mask)


class PositionsCountPadding(sound.LearnedDecoder):
    """Positions are places in the row, padding counted."""

    def positions(self, ids: Tensor, real: Tensor | None, start: int) -> Tensor:
        return super().positions(ids, None, start)


class PaddingOnTheRightAssumed(sound.Decoder):
    """The mask is made again from the number of real tokens, as if padding were on the right."""

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        if real is not None:
            real = torch.arange(keys)[None] < real.sum(-1, keepdim=True)
        return super().mask(length, keys, real)


class NaNFromEmptyRow(sound.ByHand):
    """Hidden scores are −inf and padding may see nothing: its softmax is 0/0."""

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        seen = super().mask(length, keys, None)
        assert seen is not None
        return seen if real is None else seen & real[:, None, None, :].bool()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        assert mask is not None
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


class SoftmaxOverQueries(sound.ByHand):
    """The softmax runs over the axis of the queries."""

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-2)


class WindowOneTooLong(sound.Windowed):
    """i − j ≤ window in place of i − j < window."""

    def looks_back(self) -> int:
        return self.window + 1


class WindowOneTooShort(sound.Windowed):
    """The query's own key is not counted among the window's, and one is lost."""

    def looks_back(self) -> int:
        return self.window - 1


class DocumentsLeak(sound.Packed):
    """The documents' ids are taken and not used."""

    def join_documents(self, causal: Tensor, ids: Tensor) -> Tensor:
        return causal.expand(ids.shape[0], -1, -1)


class DropoutInEval(sound.Decoder):
    """F.dropout's own default is training=True."""

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return F.dropout(super().embed(input_ids, positions), 0.1)


class NoiseInEval(sound.Encoder):
    """Random numbers that no dropout draws."""

    def mix(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn_like(x)


class IgnoresPadding(sound.Encoder):
    """The padding mask is taken and not used."""

    def mask(self, length: int, real: Tensor | None) -> Tensor | None:
        return None


class InvertedPadding(sound.Encoder):
    """torch's key_padding_mask convention in a place that reads True as visible."""

    def mask(self, length: int, real: Tensor | None) -> Tensor | None:
        return None if real is None else real[:, None, None, :] == 0


class MaskAddedAsNumbers(sound.Encoder):
    """A 0/1 mask is added to the scores."""

    def mask(self, length: int, real: Tensor | None) -> Tensor | None:
        if real is None:
            return None
        return real[:, None, None, :].to(self.embedding.weight.dtype)


class CausalEncoder(sound.Encoder):
    """A decoder's mask left in an encoder."""

    def mask(self, length: int, real: Tensor | None) -> Tensor | None:
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        return seen if real is None else seen & real[:, None, None, :].bool()


class MixesTheBatch(sound.Encoder):
    """Normalises over the batch, also in eval."""

    def mix(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(dim=0, keepdim=True)


class SequenceFirstInside(sound.TorchEncoder):
    """nn.MultiheadAttention reads (sequence, batch, width) where it is not told otherwise."""

    batch_first_inside = False


class NormOverTheSequence(sound.Decoder):
    """No attention is to blame: the mean over the sequence holds the future."""

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(input_ids, positions)
        return x - x.mean(dim=1, keepdim=True)


class OtherWhenTraced(sound.Decoder):
    """A branch for tracing, written once and never looked at again: no mask."""

    def mask(self, length: int, keys: int, real: Tensor | None) -> Tensor | None:
        if torch.compiler.is_compiling():
            return None
        return super().mask(length, keys, real)


class ScaleInOnePath(sound.Backends):
    """The fused branch scales by the model's width."""

    def fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=0.05)


@dataclass(frozen=True)
class Case:
    """A faulty model, its correct twin, and what must be said of the fault."""

    faulty: type[nn.Module]
    twin: type[nn.Module]
    check: str
    cause: str
    inputs: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


def ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randperm(sound.WORDS)[None, :12]}


def documents() -> dict[str, Tensor]:
    return {**ids(), "document_ids": torch.tensor([[0] * 4 + [1] * 5 + [2] * 3])}


def features() -> Tensor:
    return torch.randn(1, 12, sound.WIDTH)


LEAK, MEASURED, PADDING, CACHE = "future leak", "measured mask", "padding", "cache"
CASES = [
    Case(InvertedMask, sound.Decoder, LEAK, "mask-polarity", ids),
    Case(OffByOne, sound.Decoder, LEAK, "causal-off-by-one", ids),
    Case(LeaksWithoutPaddingMask, sound.Decoder, LEAK, "leak-without-padding-mask", ids),
    Case(LeaksInSdpa, sound.Backends, LEAK, "leak-in-one-backend", ids),
    Case(SoftmaxOverQueries, sound.ByHand, LEAK, "softmax-axis", ids),
    Case(NormOverTheSequence, sound.Decoder, LEAK, "future-leak", ids),
    Case(DocumentsLeak, sound.Packed, LEAK, "document-leak", documents),
    Case(WindowOneTooLong, sound.Windowed, MEASURED, "window-off-by-one", ids),
    Case(WindowOneTooShort, sound.Windowed, MEASURED, "window-off-by-one", ids),
    Case(CausalEncoder, sound.Encoder, MEASURED, "causal-in-encoder", ids),
    Case(RotaryOffsetLost, sound.Decoder, CACHE, "rope-offset-lost", ids),
    Case(LearnedOffsetLost, sound.LearnedDecoder, CACHE, "rope-offset-lost", ids),
    Case(TopLeftCausal, sound.Decoder, CACHE, "top-left-causal", ids),
    Case(CacheOverwrites, sound.Decoder, CACHE, "cache-overwrite", ids),
    Case(CacheDropsNewest, sound.Decoder, CACHE, "cache-drops-newest", ids),
    Case(PaddingForgottenInDecode, sound.Decoder, CACHE, "padding-lost-with-cache", ids),
    Case(PositionsCountPadding, sound.LearnedDecoder, PADDING, "positions-under-padding", ids),
    Case(PaddingOnTheRightAssumed, sound.Decoder, PADDING, "padding-side", ids),
    Case(NaNFromEmptyRow, sound.ByHand, PADDING, "nan-from-empty-row", ids),
    Case(NaNFromEmptyRow, sound.ByHand, "gradients", "nan-from-empty-row", ids),
    Case(IgnoresPadding, sound.Encoder, PADDING, "padding-mask-ignored", ids),
    Case(InvertedPadding, sound.Encoder, PADDING, "mask-polarity", ids),
    Case(MaskAddedAsNumbers, sound.Encoder, PADDING, "float-mask-added", ids),
    Case(SequenceFirstInside, sound.TorchEncoder, "batch", "batch-and-sequence-swapped", features),
    Case(MixesTheBatch, sound.Encoder, "batch", "batch-leak", ids),
    Case(OtherWhenTraced, sound.Decoder, "agreement", "exported-form-differs", ids),
    Case(ScaleInOnePath, sound.Backends, "agreement", "path-differs", ids),
    Case(DropoutInEval, sound.Decoder, "eval", "dropout-in-eval", ids),
    Case(NoiseInEval, sound.Encoder, "eval", "random-in-eval", ids),
]
