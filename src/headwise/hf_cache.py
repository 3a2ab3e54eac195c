"""The int8 cache through transformers' Cache interface. Importing it needs transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headwise.errors import BadInput
from headwise.int8_cache import QuantizedKVCache
from headwise.quantized import BLOCK, Held

NAME = "headwise"


class QuantizedCache(Cache):
    """`past_key_values` in int8, for models that attend with headwise.

        model.set_attn_implementation("headwise")
        past = headwise.hf.QuantizedCache(model)
        model.generate(**inputs, past_key_values=past)

    One `QuantizedKVCache` a layer, which grows by half when it is full; `capacity` makes room for
    so many tokens from the start. One new token is attended to upon int8 in place; a longer chunk
    sees its own keys and values as they came. Layers with a window keep all tokens.

    Raises:
        BadInput: the model does not attend with headwise, or is no decoder with a cache.
    """

    def __init__(self, model: Any, capacity: int = 256) -> None:
        config = getattr(model, "config", None)
        given = getattr(config, "_attn_implementation", None)
        if given != NAME:
            raise BadInput(
                f"QuantizedCache: the model attends with {given!r}, which cannot read int8; call "
                f'model.set_attn_implementation("{NAME}") first'
            )
        if getattr(config, "is_encoder_decoder", False):
            raise BadInput(
                "QuantizedCache: this model has an encoder, whose keys no new token is added to; "
                "wanted a decoder alone"
            )
        if capacity < 1:
            raise BadInput(f"QuantizedCache: capacity={capacity} must be at least 1 token")
        self._capacity = capacity
        super().__init__(layer_class_to_replicate=self._layer)

    def _layer(self) -> _Layer:
        return _Layer(self._capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers: int8, scales and tails, with room for tokens to come."""
        stores = [layer.store for layer in self.layers if isinstance(layer, _Layer)]
        return sum(store.nbytes for store in stores if store is not None)


class _Layer(CacheLayerMixin):
    """One layer's cache, made when its first keys come."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.store: QuantizedKVCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = QuantizedKVCache(
            batch, heads, self.capacity, dim, value_states.shape[3],
            dtype=key_states.dtype, device=key_states.device,
        )  # fmt: skip
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | Held, Tensor | Held]:
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        length = key_states.shape[2]
        wanted = store.length + length
        if wanted > store.capacity:
            more = max(wanted, store.capacity + store.capacity // 2)
            store.grow(-(-more // BLOCK) * BLOCK)
        if length == 1:
            held, _, _ = store.store(key_states, value_states)
            return held, held
        cached = store.append(key_states, value_states)
        return cached.keys, cached.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self.store is not None:
            self.store.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers has it: a negative number, of the newest tokens to forget."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"QuantizedCache.crop: wanted a negative number of tokens to remove, got "
                f"{tokens_to_remove}"
            )
        if self.store is not None:
            self.store.crop(max(0, self.store.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store is not None:
            self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.store.reorder(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            picked = torch.arange(self.store.batch, device=indices.device)[indices]
            self.store.reorder(picked)

    def offload(self) -> None:
        raise NotImplementedError("QuantizedCache: offloading to another device is not offered")


__all__ = ["QuantizedCache"]
