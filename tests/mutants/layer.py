"""Faults of positions, caches and the layer."""

from mutants.fault import Mutant, faults

LAYER = [
    *faults(
        "positions.py",
        "positions",
        Mutant("ALiBi slopes start at 1", "(-8 * (head + 1) / lower)", "(-8 * head / lower)"),
        Mutant(
            "ALiBi takes the slopes between, not the odd ones",
            "range(0, 2 * lower, 2)",
            "range(1, 2 * lower, 2)",
        ),
        Mutant(
            "ALiBi rewards keys ahead",
            "-(_rows(queries)[:, None, :, None] - keys).abs()",
            "-(_rows(queries)[:, None, :, None] - keys)",
        ),
        Mutant(
            "ALiBi by key allows one key ahead in runs",
            "torch.where(end > start, end, 0) > own + 1",
            "torch.where(end > start, end, 0) > own + 2",
            "positions::test_key_form_is_refused_where_a_later_key_is_seen",
        ),
        Mutant(
            "ALiBi by key allows keys ahead in bits",
            "(seen.tile() & (index > own)).any()",
            "(seen.tile() & (index > own + keys)).any()",
            "positions::test_key_form_is_refused_where_a_later_key_is_seen",
        ),
        Mutant(
            "ALiBi by key reads the runs of a mask without its bits",
            "seen.intervals is not None and seen.bits is None",
            "seen.intervals is not None",
            "positions::test_causality_is_read_from_runs_and_bits_together",
        ),
        Mutant(
            "positions count from 1",
            "real.to(torch.int64).cumsum(-1) - 1",
            "real.to(torch.int64).cumsum(-1)",
            "positions::test_positions_are_counted_from_the_real_tokens",
        ),
        Mutant(
            "decoding goes on from the last pad",
            "newest = torch.where(real, index, -1).amax(-1)",
            "newest = torch.where(real, index, index).amax(-1)",
            "cache",
        ),
        Mutant(
            "left and right padding swapped in counting",
            'index < count if mask.side == "right"',
            'index < count if mask.side == "left"',
            "positions::test_real_tokens_are_read_out_of_joined_masks_only",
        ),
        Mutant(
            "T5 mixes up before and after",
            "(ahead > 0) * (self.num_buckets // 2)",
            "(ahead < 0) * (self.num_buckets // 2)",
            "positions::test_relative_bias_is_that_of_t5_at_every_distance",
        ),
        Mutant(
            "T5 far distances share one bucket less",
            "grown.clamp(max=side - 1)",
            "grown.clamp(max=side - 2)",
            "positions::test_relative_bias_is_that_of_t5_at_every_distance",
        ),
    ),
    *faults(
        "rotary.py",
        "rotary",
        Mutant(
            "cos and sin swapped",
            "turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)",
            "turned = torch.cat((a * sin - b * cos, b * sin + a * cos), -1)",
            "rotary::test_rotation_is_that_of_llama",
        ),
        Mutant(
            "interleaved pairs turn backwards",
            "torch.stack((a * cos - b * sin, b * cos + a * sin), -1)",
            "torch.stack((a * cos + b * sin, b * cos - a * sin), -1)",
            "rotary::test_interleaved_pairs_turn_as_complex_numbers",
        ),
        Mutant(
            "layouts mixed",
            "if self.interleaved:",
            "if not self.interleaved:",
            "rotary::test_rotation_is_that_of_llama",
        ),
        Mutant(
            "partial rotary divides by the whole head",
            "torch.arange(0, dim, 2, dtype=_wide(device), device=device) / dim",
            "torch.arange(0, dim, 2, dtype=_wide(device), device=device) / head_dim",
        ),
        Mutant(
            "angles in float32",
            'torch.float32 if device.type == "mps" else torch.float64',
            "torch.float32",
        ),
        Mutant(
            "linear scaling multiplies",
            "base**-exponents / self.factor, 1.0",
            "base**-exponents * self.factor, 1.0",
        ),
        Mutant("NTK base without its power", "power = dim / (dim - 2)", "power = 1.0"),
        Mutant(
            "dynamic NTK one token late",
            "positions.amax(-1, keepdim=True) + 1 if dynamic",
            "positions.amax(-1, keepdim=True) if dynamic",
        ),
        Mutant(
            "dynamic NTK by the batch's longest row",
            "positions.amax(-1, keepdim=True) + 1 if dynamic",
            "positions.amax().reshape(1) + 1 if dynamic",
        ),
        Mutant(
            "YaRN ramp the wrong way",
            "plain / self.factor * stretched + plain * (1 - stretched)",
            "plain / self.factor * (1 - stretched) + plain * stretched",
        ),
        Mutant(
            "YaRN ramp not cut at the first pair",
            "low, high = max(low, 0), min(high, dim - 1)",
            "low, high = low, min(high, dim - 1)",
        ),
        Mutant(
            "YaRN magnitude left out",
            "magnitude = 0.1 * math.log(self.factor) + 1.0",
            "magnitude = 1.0",
        ),
        Mutant(
            "YaRN magnitude on cos alone",
            "(angles.sin() * magnitude).to(keep)",
            "angles.sin().to(keep)",
        ),
        Mutant(
            "Llama 3 blends the wrong way",
            "plain * kept + plain / self.factor * (1 - kept)",
            "plain * (1 - kept) + plain / self.factor * kept",
        ),
    ),
    *faults(
        "cache.py",
        "cache",
        Mutant(
            "new keys overwrite the newest old one",
            "self._put(self._end, key, value, *self._note",
            "self._put(max(0, self._end - 1), key, value, *self._note",
        ),
        Mutant(
            "the newest key is not returned",
            "return self._view(0, self._end)",
            "return self._view(0, self._end - 1)",
        ),
        Mutant(
            "a full cache refuses its last token",
            "if self._end + length > self.capacity:",
            "if self._end + length >= self.capacity:",
        ),
        Mutant(
            "rolling cache one key short",
            "older = min(self._end - self._begin, self.window - 1)",
            "older = min(self._end - self._begin, max(0, self.window - 2))",
        ),
        Mutant(
            "rolling cache crops too far back",
            "if self.length - dropped < min(length, self.window - 1):",
            "if self.length - dropped < min(length, self.window - 2):",
        ),
        Mutant(
            "tokens after padding count as padding",
            "real = torch.ones(self.batch, length",
            "real = torch.zeros(self.batch, length",
        ),
        Mutant(
            "tokens before the first pad count as padding",
            "self._real = torch.ones_like(self._positions",
            "self._real = torch.zeros_like(self._positions",
        ),
        Mutant(
            "rows with other padding share one counter",
            "positions.shape[0] == 1 and real is None",
            "positions.shape[0] == 1",
        ),
        Mutant(
            "beams keep the counters of other rows",
            "self._next = self._next.index_select(0, indices)",
            "self._next = self._next[:1].expand(len(indices))",
        ),
        Mutant(
            "reset goes on counting",
            "None, True\n        self._next = torch.zeros_like(self._next)",
            "None, True",
        ),
    ),
    *faults(
        "layer.py",
        "layer",
        Mutant(
            "rotary offset lost with the cache",
            "positions = cache.next_positions(length, real)",
            "positions = torch.arange(length, device=query.device)",
            "layer::test_chunks_single_tokens_and_one_pass_agree",
        ),
        Mutant("keys are not turned", "self.position.turn(key, *table)", "key"),
        Mutant(
            "the keys' norm is that of the queries",
            "key = _normed(self.k_norm, key)",
            "key = _normed(self.q_norm, key)",
        ),
        Mutant(
            "a layer's window drops the mask",
            "own if mask is None else own & mask",
            "own",
            "layer::test_a_rolling_cache_remembers_padding_and_positions",
        ),
        Mutant(
            "dropout in eval",
            "attend(parts, self.dropout if self.training else 0.0)",
            "attend(parts, self.dropout)",
            "layer::test_dropout_acts_in_training_only_and_repeats_with_the_seed",
        ),
        Mutant(
            "padding in the cache is forgotten",
            "padding(all_real) if mask is None else mask & padding(all_real)",
            "padding(all_real) if mask is None else mask",
            "layer::test_decoding_after_padding_goes_on_from_the_real_tokens "
            "layer::test_a_rolling_cache_remembers_padding_and_positions",
        ),
        Mutant(
            "new tokens take the flags of the first",
            "real[:, keys - length :]",
            "real[:, :length]",
            "layer::test_padding_of_all_keys_may_be_given_with_each_chunk",
        ),
        Mutant(
            "values are made of the key context",
            "self.k_proj(keys), self.v_proj(values)",
            "self.k_proj(keys), self.v_proj(keys)",
            "layer::test_cross_attention_of_any_widths_is_the_float64_definition",
        ),
        Mutant(
            "the gate without its sigmoid", "torch.sigmoid(self.gate_proj(x))", "self.gate_proj(x)"
        ),
        Mutant(
            "fused weight read as queries, values, keys",
            "source.chunk(3)[index]",
            "source.chunk(3)[-index]",
            "layer_parity::test_rows_of_the_fused_weight_are_queries_keys_values",
        ),
        Mutant(
            "weights of the heads summed",
            "weights.mean(1)",
            "weights.sum(1)",
            "layer::test_weights_are_per_head_and_average_on_request",
        ),
    ),
    *faults(
        "options.py",
        "layer arguments",
        Mutant(
            "reach leaves out the query's own key",
            "self.window[0] + 1 if self.window[1] == 0",
            "self.window[0] if self.window[1] == 0",
            "layer::test_make_cache_fits_the_layer",
        ),
        Mutant(
            "left and right of a window swapped",
            "window(left=self.window[0], right=self.window[1])",
            "window(left=self.window[1], right=self.window[0])",
            "layer::test_a_window_of_two_sides_is_that_mask",
        ),
    ),
    *faults(
        "arguments.py",
        "arguments layer",
        Mutant(
            "a rolling cache one key short is taken",
            "cache.window < reach)",
            "cache.window < reach - 1)",
        ),
        Mutant(
            "a dynamic base is taken with a cache",
            "if scaling is not None and scaling.dynamic:",
            "if scaling is not None and not scaling.dynamic:",
        ),
        Mutant(
            "batch compared with the sequence",
            "if first.shape[0] != x.shape[0]:",
            "if first.shape[1] != x.shape[0]:",
        ),
        Mutant("a pair of contexts loses its values", "return keys, values", "return keys, keys"),
        Mutant(
            "contexts of unequal length are taken",
            "if keys.shape[:2] != values.shape[:2]:",
            "if keys.shape[:1] != values.shape[:1]:",
            "arguments",
        ),
    ),
]
