"""Watch any model's attention without changing what it computes.

Run: python examples/watch.py
"""

from __future__ import annotations

import torch
from torch import nn

import headwise

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
tokens = torch.randn(2, 9, 32)
padding = torch.arange(9) >= torch.tensor([[9], [6]])  # True: padding, as torch means it

with torch.no_grad():
    alone = model(tokens, src_key_padding_mask=padding)
    with headwise.watch(model) as seen:
        watched = model(tokens, src_key_padding_mask=padding)

# torch's fused kernel ran both times: the outputs agree in every bit.
assert torch.equal(alone, watched)

print(seen)
for call in seen:
    weights = call.weights()  # (batch, heads, queries, keys); a clue, never an explanation
    statistics = call.statistics()
    print(f"\n{call.id} ({call.module}), mask: {call.mask_words}")
    print("  weight on padding:", float(weights[1, :, :, 6:].sum()))
    print("  entropy of each head (nats):", [round(x, 3) for x in statistics.entropy[0].tolist()])

# Long runs need not keep anything: each call is handed over as it happens.
with (
    torch.no_grad(),
    headwise.watch(model, keep=False, on_call=lambda call: print("saw", call.id, call.route)),
):
    model(tokens)
