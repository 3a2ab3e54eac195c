"""Faults of `attention` and of its backends."""

from mutants.fault import Mutant, faults

BACKENDS = [
    *faults(
        "attention.py",
        "attention",
        Mutant(
            "merge takes the larger lse",
            "torch.logsumexp(all_lse, dim=0)",
            "torch.amax(all_lse, dim=0)",
        ),
        Mutant(
            "merge of parts that saw nothing is NaN",
            "torch.where(all_lse == -torch.inf, 0.0, torch.exp(all_lse - lse))",
            "torch.exp(all_lse - lse)",
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
            "attention",
        ),
        Mutant(
            "gradients: a part's keys added at the front",
            "whole = whole[:, :, keys]",
            "whole = whole[:, :, : keys.stop - keys.start]",
            "attention::test_gradients_equal_finite_differences attention",
        ),
        Mutant(
            "gradients: a bias with one row learns from one block",
            "whole[..., rows if whole.shape[-2] > 1 else slice(None), :]",
            "whole[..., rows, :]",
            "attention",
        ),
    ),
    *faults(
        "backends/reference.py",
        "attention",
        Mutant(
            "the definition runs in the call's precision",
            "exact.forward(call.to(torch.float64), seed)",
            "exact.forward(call, seed)",
        ),
    ),
    *faults(
        "backends/__init__.py",
        "attention::TestBackends",
        Mutant("the definition is preferred", "(Sdpa(), Reference())", "(Reference(), Sdpa())"),
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
            "known_faults attention",
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
        ),
        Mutant(
            "sdpa: a small scale hides an overflow",
            "max(1.0, call.scale_value)",
            "call.scale_value",
        ),
        Mutant(
            "sdpa: a bias with one row is cut with the block",
            "some if bias.shape[2] > 1 else slice(None),",
            "some,",
        ),
        Mutant(
            "sdpa: gradients of an empty row",
            "grad = torch.where(block.empty, 0.0, grad)",
            "grad = grad + 0.0",
            "known_faults attention",
        ),
        Mutant(
            "sdpa: gradients of a block replace the others'",
            "grads[name][:, :, block.keys] += part",
            "grads[name][:, :, block.keys] = part",
        ),
        Mutant(
            "sdpa: gradients without the scale",
            "attn_mask=mask,\n                scale=call.scale_value,\n",
            "attn_mask=mask,\n",
            "attention::test_gradients_equal_finite_differences",
        ),
        Mutant(
            "sdpa: gradients of shared heads summed as tiles",
            "d_key[..., : call.head_dim].to(wide).unflatten(1, groups).sum(2)",
            "d_key[..., : call.head_dim].to(wide).unflatten(1, groups[::-1]).sum(1)",
            "attention::test_gradients_at_lengths_that_are_and_are_not_tile_multiples properties",
        ),
    ),
]
