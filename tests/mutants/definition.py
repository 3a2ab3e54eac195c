"""Faults of masks, of the call and of the definition."""

from mutants.fault import Mutant, faults

DEFINITION = [
    *faults(
        "masks.py",
        "masks",
        Mutant(
            "causal hides the query's own key",
            "own + self.right + 1",
            "own + self.right",
            "known_faults masks",
        ),
        Mutant(
            "causal sees one key ahead",
            "own + self.right + 1",
            "own + self.right + 2",
            "known_faults masks",
        ),
        Mutant(
            "window one key too long",
            "_Band(size - 1, 0, align, offset)",
            "_Band(size, 0, align, offset)",
            "known_faults masks",
        ),
        Mutant(
            "end and start alignment swapped",
            'sizes.keys - sizes.queries if self.align == "end" else 0',
            '0 if self.align == "end" else sizes.keys - sizes.queries',
            "known_faults masks",
        ),
        Mutant(
            "one query aligned at the start sees every key",
            'causal and (self.align == "end" or sizes.queries == sizes.keys)',
            "causal",
        ),
        Mutant(
            "a window passes for plain causal",
            "causal = self.left is None and self.right == 0",
            "causal = self.right == 0",
            "known_faults masks",
        ),
        Mutant(
            "padding lengths on the other side",
            '(zero, count) if self.side == "right"',
            '(zero, count) if self.side == "left"',
        ),
        Mutant(
            "padding flags laid over queries", ".bool()[:, None, None, :]", ".bool()[None, None]"
        ),
        Mutant(
            "a document loses its last key",
            'end = torch.searchsorted(keys, queries, side="right")',
            'end = torch.searchsorted(keys, queries, side="right") - 1',
        ),
        Mutant(
            "documents that come back taken as sorted",
            "grown = keys[:, 1:] >= keys[:, :-1]",
            "grown = keys[:, 1:] <= keys[:, 1:]",
        ),
        Mutant(
            "queries take the documents of the first keys",
            "keys[:, sizes.keys - sizes.queries :]",
            "keys[:, : sizes.queries]",
        ),
        Mutant(
            "prefix one key short",
            "end = length.clamp(0, sizes.keys)",
            "end = (length - 1).clamp(0, sizes.keys)",
        ),
        Mutant(
            "hide means keep",
            '_Grid(~_want_bool("hide", grid), "hide")',
            '_Grid(_want_bool("hide", grid), "hide")',
            "known_faults masks",
        ),
        Mutant(
            "an expanded mask is copied for each head",
            "unexpand(grid.to(sizes.device))",
            "grid.to(sizes.device)",
            "masks known_faults",
        ),
    ),
    *faults(
        "intervals.py",
        "masks",
        Mutant("a run includes its end", "(index < runs[..., 1:2])", "(index <= runs[..., 1:2])"),
        Mutant(
            "and starts at the earlier start",
            "torch.maximum(one[..., 0], two[..., 0])",
            "torch.minimum(one[..., 0], two[..., 0])",
        ),
        Mutant("and joins bits by or", "bits = a.bits & b.bits", "bits = a.bits | b.bits"),
        Mutant("or of a packed mask is and", "a.tile() | b.tile()", "a.tile() & b.tile()"),
        Mutant(
            "not trusts the order of runs",
            "if seen.intervals is None else _disjoint(seen.intervals)",
            "if seen.intervals is None else seen.intervals",
        ),
        Mutant(
            "runs that overlap are counted twice",
            "reach = end.cummax(dim=-1).values",
            "reach = end",
        ),
        Mutant(
            "a third run is dropped", "filled.numel() else 0) <= 2", "filled.numel() else 0) <= 3"
        ),
        Mutant(
            "a single run stands twice",
            "start = torch.where(count > 1, start, stop)",
            "start = torch.where(count > 0, start, stop)",
        ),
        Mutant(
            "a part of the keys keeps the old numbers",
            "(_rows_of(runs, rows) - start).clamp(0, stop - start)",
            "_rows_of(runs, rows).clamp(0, stop - start)",
            "attention::test_every_feature_equals_the_plain_loop",
        ),
        Mutant(
            "a part from the middle of a byte keeps its bits",
            "if start % 8 == 0:",
            "if start % 8 >= 0:",
            "masks::test_a_part_is_a_mask_of_its_own",
        ),
        Mutant(
            "unpacked bits start at the byte",
            "spread[..., start % 8 : start % 8 + stop - start]",
            "spread[..., : stop - start]",
        ),
        Mutant(
            "the hull begins at an empty run",
            "low = torch.where(filled, starts, self.sizes.keys).min()",
            "low = starts.min()",
        ),
    ),
    *faults(
        "call.py",
        "attention",
        Mutant(
            "scale by the width of values",
            "math.sqrt(max(1, self.head_dim))",
            "math.sqrt(max(1, self.value_dim))",
            "known_faults attention",
        ),
        Mutant(
            "scale without the root",
            "math.sqrt(max(1, self.head_dim))",
            "max(1, self.head_dim)",
            "known_faults",
        ),
        Mutant(
            "a bias with one row is cut with the rows",
            "bias[..., rows if bias.shape[-2] > 1 else slice(None), :]",
            "bias[..., rows, :]",
            "attention::test_more_rows_than_one_block_holds",
        ),
        Mutant(
            "a bias with one column is cut with the keys",
            "bias[..., keys if bias.shape[-1] > 1 else slice(None)]",
            "bias[..., keys]",
            "attention::test_a_bias_with_one_column_meets_a_mask_that_starts_late",
        ),
    ),
    *faults(
        "reference.py",
        "attention",
        Mutant(
            "heads split by view",
            "x.unflatten(-1, (num_heads, -1)).transpose(1, 2)",
            "x.reshape(x.shape[0], num_heads, x.shape[1], -1)",
            "attention::test_split_and_merge_move_whole_tokens",
        ),
        Mutant(
            "heads merged without transpose",
            "x.transpose(1, 2).flatten(-2)",
            "x.reshape(x.shape[0], x.shape[2], -1)",
            "attention::test_split_and_merge_move_whole_tokens",
        ),
        Mutant(
            "the sink counts twice",
            "total = total + torch.exp(sink - shift)",
            "total = total + 2 * torch.exp(sink - shift)",
            "known_faults",
        ),
        Mutant(
            "the sink is not shifted",
            "total = total + torch.exp(sink - shift)",
            "total = total + torch.exp(sink)",
        ),
        Mutant(
            "an empty row's lse is its sink (definition)",
            "torch.where(empty, -torch.inf, shift + torch.log(total))",
            "(shift + torch.log(total))",
            "attention::test_a_sink_does_not_fill_a_row_with_no_key",
        ),
        Mutant(
            "softcap after the bias",
            "s = torch.where(bias == -torch.inf, -torch.inf, s + bias.to(dtype))",
            "s = torch.where(bias == -torch.inf, -torch.inf, s + bias.to(dtype))\n"
            "        if call.softcap is not None:\n"
            '            s = call.softcap * torch.tanh((steps["scaled"] + bias) / call.softcap)',
            "attention::test_order_softcap_before_bias_before_mask",
        ),
        Mutant(
            "softcap after the mask",
            'steps["masked"] = s\n',
            "if call.softcap is not None:\n"
            "        s = call.softcap * torch.tanh(s / call.softcap)\n"
            '    steps["masked"] = s\n',
            "attention::test_order_softcap_before_bias_before_mask",
        ),
        Mutant(
            "the mask is added, so NaN leaks",
            "s = torch.where(call.visible.tile(), s, -torch.inf)",
            "s = s + torch.where(call.visible.tile(), 0.0, -torch.inf)",
            "attention::test_nan_reaches_the_rows_that_see_it_and_no_other",
        ),
        Mutant(
            "hidden scores are only very small",
            "s = torch.where(call.visible.tile(), s, -torch.inf)",
            "s = torch.where(call.visible.tile(), s, -1e9)",
            "known_faults",
        ),
        Mutant(
            "a bias of minus infinity lets NaN through",
            "torch.where(bias == -torch.inf, -torch.inf, s + bias.to(dtype))",
            "s + bias.to(dtype)",
            "attention::test_a_bias_of_minus_infinity_hides_even_nan",
        ),
        Mutant(
            "the scale comes after the product",
            '(query * scale) @ key.mT if scale < 1 else steps["scores"] * scale',
            'steps["scores"] * scale',
            "attention::test_large_scores_do_not_overflow",
        ),
        Mutant(
            "grouped heads tiled",
            "x.repeat_interleave(groups, dim=1)",
            "x.repeat(1, groups, 1, 1)",
            "known_faults",
        ),
        Mutant(
            "gradients: lse pulls the wrong way",
            "grad_lse.to(dtype).unsqueeze(-1) - delta",
            "-grad_lse.to(dtype).unsqueeze(-1) - delta",
            "attention::test_gradients_equal_finite_differences",
        ),
        Mutant(
            "gradients: slope of the softcap not squared",
            '(1 - (steps["capped"] / call.softcap) ** 2)',
            '(1 - steps["capped"] / call.softcap)',
            "attention::test_gradients_equal_finite_differences",
        ),
        Mutant(
            "gradients: shared heads summed as tiles",
            ".unflatten(1, (call.num_kv_heads, call.groups)).sum(2)",
            ".unflatten(1, (call.groups, call.num_kv_heads)).sum(1)",
            "attention::test_gradients_equal_finite_differences",
        ),
        Mutant(
            "gradients: dropout left out of the scores'",
            "d_weights = d_weights * drop",
            "d_weights = d_weights * 1.0",
            "attention::TestDropout",
        ),
        Mutant(
            "gradients: NaN of a row outside the loss",
            "p = torch.where(pulled, p, 0.0)",
            "p = p + 0.0",
            "attention::test_nan_reaches_the_rows_that_see_it_and_no_other "
            "attention::test_a_nan_query_outside_the_loss_leaves_gradients_finite",
        ),
    ),
]
