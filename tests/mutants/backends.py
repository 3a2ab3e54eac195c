"""Faults of `attention` and of its backends."""

from mutants.fault import Mutant, faults

BACKENDS = [
    *faults(
        "attention.py",
        "attention",
        Mutant(
            "merge takes the larger lse",
            "torch.logsumexp(torch.where(empty, 0.0, all_lse), dim=0)",
            "torch.amax(torch.where(empty, 0.0, all_lse), dim=0)",
            "attention::test_merge_joins_parts_of_the_keys",
        ),
        Mutant(
            "merge of parts that saw nothing is NaN",
            "torch.where(empty, 0.0, all_lse)",
            "all_lse",
            "attention::test_merge_joins_parts_of_the_keys",
        ),
        Mutant(
            "every call drops the same weights",
            "torch.randint(2**62, ())",
            "torch.tensor(7)",
            "attention::TestDropout",
        ),
        Mutant(
            "packed bits are lost on the way to autograd",
            "CompiledMask(sizes, intervals, bits, is_full, is_causal)",
            "CompiledMask(sizes, intervals, None, is_full, is_causal)",
            "attention::test_more_rows_than_one_block_holds",
        ),
        Mutant(
            "the gradient of lse is thrown away",
            "grad_lse if need_lse else None,",
            "None,",
            "attention::test_gradients_equal_finite_differences",
        ),
        Mutant(
            "no keys give lse 0",
            "call.query.new_full(shape, -torch.inf,",
            "call.query.new_full(shape, 0.0,",
            "attention::test_empty_sizes",
        ),
    ),
    *faults(
        "backends/exact.py",
        "attention::TestDropout",
        Mutant("dropout is not scaled", " / (1 - part.dropout)", ""),
        Mutant(
            "dropout keeps what it should drop", "draws >= part.dropout", "draws < part.dropout"
        ),
        Mutant(
            "each block drops the same weights",
            "        draws = torch.rand(",
            "        self.generator.manual_seed(self.generator.initial_seed())\n"
            "        draws = torch.rand(",
            "attention::TestDropout",
        ),
        Mutant(
            "gradients: a part's keys added at the front",
            "whole = whole[:, :, keys]",
            "whole = whole[:, :, : keys.stop - keys.start]",
            "attention::test_what_is_asked_of_a_row_with_no_key_pulls_on_nothing attention",
        ),
        Mutant(
            "gradients: a bias with one row learns from one block",
            "whole[..., rows if whole.shape[-2] > 1 else slice(None), :]",
            "whole[..., rows, :]",
            "attention::test_more_rows_than_one_block_holds",
        ),
    ),
    *faults(
        "backends/reference.py",
        "attention",
        Mutant(
            "the definition runs in the call's precision",
            "exact.forward(call.to(torch.float64), seed)",
            "exact.forward(call, seed)",
            "attention::TestBackends",
        ),
    ),
    *faults(
        "backends/__init__.py",
        "attention::TestBackends",
        Mutant(
            "the definition is preferred",
            "(Native(), Sdpa(), Reference())",
            "(Reference(), Native(), Sdpa())",
        ),
    ),
    *faults(
        "backends/sdpa.py",
        "attention",
        Mutant(
            "sdpa: a sink pulls the wrong way",
            "torch.sigmoid(lse - sink)",
            "torch.sigmoid(sink - lse)",
            "known_faults",
        ),
        Mutant(
            "sdpa: an empty row's lse is its sink",
            "torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sink))",
            "torch.logaddexp(lse, sink)",
            "attention::test_a_sink_does_not_fill_a_row_with_no_key",
        ),
        Mutant(
            "sdpa: torch's top-left causal for any sizes",
            "visible.is_causal and length == keys:",
            "visible.is_causal:",
            "known_faults",
        ),
        Mutant(
            "sdpa: a bias without a mask is ignored",
            "if call.bias is None and visible.is_full:",
            "if visible.is_full:",
            "attention::test_a_bias_without_a_mask_is_added",
        ),
        Mutant(
            "sdpa: a row with no key gets the mean",
            "output = torch.where(block.empty, 0.0, output)",
            "output = output + 0.0",
            "known_faults",
        ),
        Mutant(
            "sdpa: NaN passes the look at the numbers",
            "return product <= limit and largest[2]",
            "return not product > limit and largest[2]",
            "attention::test_nan_reaches_the_rows_that_see_it_and_no_other",
        ),
        Mutant(
            "sdpa: a small scale hides an overflow",
            "max(1.0, call.scale_value)",
            "call.scale_value",
            "attention::test_large_scores_do_not_overflow",
        ),
        Mutant(
            "sdpa: a bias with one row is cut with the block",
            "some if bias.shape[2] > 1 else slice(None),",
            "some,",
            "attention::test_more_rows_than_one_block_holds",
        ),
        Mutant(
            "sdpa: gradients of an empty row",
            "grad = torch.where(block.empty, 0.0, grad)",
            "grad = grad + 0.0",
            "attention::test_what_is_asked_of_a_row_with_no_key_pulls_on_nothing",
        ),
        Mutant(
            "sdpa: gradients of a block replace the others'",
            "grads[name][:, :, block.keys] += part",
            "grads[name][:, :, block.keys] = part",
            "attention::test_more_rows_than_one_block_holds",
        ),
        Mutant(
            "sdpa: gradients without the scale",
            "attn_mask=mask,\n                scale=call.scale_value,\n",
            "attn_mask=mask,\n",
            "attention::test_gradients_take_the_given_scale",
        ),
        Mutant(
            "sdpa: gradients of shared heads summed as tiles",
            "d_key[..., : call.head_dim].to(wide).unflatten(1, groups).sum(2)",
            "d_key[..., : call.head_dim].to(wide).unflatten(1, groups[::-1]).sum(1)",
            "attention::test_gradients_at_lengths_that_are_and_are_not_tile_multiples properties",
        ),
    ),
]
