"""What the outputs of heads span and how alike they are: effective rank, stable rank, linear CKA.

Rows come in pieces, (rows, heads, features); only features × features sums are kept, so memory does
not grow with the number of rows at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.backends import choose
from headwise.errors import BadInput
from headwise.watch import SeenCall, watch


class HeadOutputs:
    """Running sums over the outputs of H heads of D features, in float64.

    effective_rank: e^{entropy of the normalised singular values} of a head's outputs (Roy &
    Vetterli 2007). stable_rank: ‖A‖²_F / ‖A‖²_2. cka: linear CKA of centred outputs (Kornblith et
    al. 2019, arXiv 1905.00414, equation for linear kernels). Singular values come from the Gram
    matrix, so those below 1e-8 of the largest are lost in rounding.
    """

    def __init__(self, heads: int, features: int) -> None:
        self.rows = 0
        self._sum = torch.zeros(heads, features, dtype=torch.float64)
        self._cross = torch.zeros(heads, heads, features, features, dtype=torch.float64)

    def add(self, outputs: Tensor) -> None:
        """outputs: (rows, H, D).

        Raises:
            BadInput: another shape.
        """
        if outputs.dim() != 3 or outputs.shape[1:] != self._sum.shape:
            heads, features = self._sum.shape
            raise BadInput(
                f"HeadOutputs: wanted (rows, {heads}, {features}), got {tuple(outputs.shape)}"
            )
        x = outputs.detach().to("cpu", torch.float64)
        self.rows += len(x)
        self._sum += x.sum(0)
        self._cross += torch.einsum("nhd,ngf->hgdf", x, x)

    def _singular(self) -> Tensor:
        if self.rows == 0:
            raise BadInput("HeadOutputs: no rows were added")
        gram = self._cross.diagonal(dim1=0, dim2=1).permute(2, 0, 1)
        return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()

    def effective_rank(self) -> Tensor:
        """(H,), from 1 to D; NaN where a head's outputs are all 0."""
        values = self._singular()
        share = values / values.sum(-1, keepdim=True)
        return torch.special.entr(share).sum(-1).exp()

    def stable_rank(self) -> Tensor:
        """(H,), from 1 to D; NaN where a head's outputs are all 0."""
        squares = self._singular().square()
        return squares.sum(-1) / squares.amax(-1)

    def cka(self) -> Tensor:
        """(H, H), 1 on the diagonal; NaN where a head's outputs do not vary.

        Raises:
            BadInput: fewer than two rows.
        """
        if self.rows < 2:
            raise BadInput(f"HeadOutputs.cka: wanted at least 2 rows, got {self.rows}")
        mean = self._sum / self.rows
        centred = self._cross - self.rows * torch.einsum("hd,gf->hgdf", mean, mean)
        square = centred.square().sum((2, 3))
        own = square.diagonal().sqrt()
        return square / (own[:, None] * own[None, :])


def head_outputs(model: nn.Module, inputs: Iterable[Mapping[str, Any]]) -> dict[str, HeadOutputs]:
    """`HeadOutputs` of every attention layer of `model` over `inputs`, keyword arguments of its
    forward, one pass each: {"self/3": …}, named as `watch` names them. Rows of padding do not
    count. For ranks and CKA that mean something, more rows than features of a head are needed.

    Raises:
        BadInput: no inputs. NothingToWatch: no attention call could be caught.
    """
    found: dict[str, HeadOutputs] = {}

    def take(item: SeenCall) -> None:
        output = item.output
        if output is None:  # a fused kernel gave only its projection
            output, _ = choose(item.call).forward(item.call, None, False)
        rows = output.transpose(1, 2)
        real = item.real_queries
        rows = rows.flatten(0, 1) if real is None else rows[real.expand(rows.shape[:2])]
        if item.id not in found:
            found[item.id] = HeadOutputs(rows.shape[1], rows.shape[2])
        found[item.id].add(rows)

    count = 0
    for given in inputs:
        with watch(model, on_call=take, keep=False), torch.no_grad():
            model(**given)
        count += 1
    if count == 0:
        raise BadInput("head_outputs: no inputs were given")
    return found
