"""Faults of what stands on the core: Hugging Face models, links, reports."""

from mutants.fault import Mutant, faults

USES = [
    *faults(
        "hf.py",
        "hf",
        Mutant(
            "Hugging Face: the softcap is lost",
            "softcap=softcap,",
            "softcap=None,",
        ),
        Mutant(
            "Hugging Face: the sinks are lost",
            "sinks = None if s_aux is None else s_aux.to(query.dtype)",
            "sinks = None",
        ),
        Mutant(
            "Hugging Face: the scale is lost",
            "scale=scaling,",
            "scale=None,",
        ),
        Mutant(
            "Hugging Face: every causal mask stands at the end",
            "at_end = first - origin == kv_length - q_length",
            "at_end = True",
        ),
        Mutant(
            "Hugging Face: padding is not hidden",
            "mask = mask & padding(real)",
            "pass",
        ),
        Mutant(
            "Hugging Face: dropout is lost",
            "dropout=dropout,",
            "dropout=0.0,",
        ),
        Mutant(
            "Hugging Face: without a mask nothing is causal",
            'mask = causal(align="start") if says and query.shape[2] > 1 else None',
            "mask = None",
        ),
        Mutant(
            "Hugging Face: a predicate is asked from position 0",
            "queries = torch.arange(start, stop, device=sizes.device) + first",
            "queries = torch.arange(start, stop, device=sizes.device)",
        ),
    ),
    *faults(
        "links.py",
        "examine",
        Mutant(
            "a link means over the key's pieces",
            "share = weights[:, keys.start : keys.stop].sum(-1)",
            "share = weights[:, keys.start : keys.stop].mean(-1)",
        ),
        Mutant(
            "the neighbour before counts as a link",
            "(keys != row) & (keys != row - 1)",
            "(keys != row)",
        ),
        Mutant(
            "the first token counts as a link",
            "barred[int((~barred).nonzero()[0])] = True",
            "pass",
        ),
    ),
    *faults(
        "examine.py",
        "examine",
        Mutant(
            "causality is not declared",
            'options["declared"] = causal()',
            "pass",
        ),
        Mutant(
            "padding rows are queries",
            'options["query_rows"] = real',
            "pass",
        ),
        Mutant(
            "token ids do not reach the statistics",
            'options["token_ids"] = self._token_ids(key, call.key_length)',
            "pass",
        ),
    ),
]
