"""Two towers, one for pictures and one for words, and cross-attention between them.

The towers make a vector of a picture and one of a text, so that a text can be found among many by
one product (Radford et al. 2021, arXiv 2103.00020). The crossing reads a picture's patches word by
word and judges the few pairs that the towers liked best (Li et al. 2021, arXiv 2107.07651).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.layer import MultiHeadAttention
from headwise.masks import padding
from headwise.positions import Rotary
from headwise.tasks.blocks import Encoder, Feedforward
from headwise.tasks.captions import PAD
from headwise.tasks.design import Design

# Of the texts of a batch, so many that are wrong but look right train the crossing.
HARD = 2
# Pixels of a token, down and across.
PATCH = 8
# As Radford et al.: similarities begin at 1 / 0.07 times a cosine, and end at 100 times.
FIRST_SCALE, LAST_SCALE = 1 / 0.07, 100.0


@dataclass(frozen=True, eq=False)
class Side:
    """What a tower makes: `vector` (B, E) of length 1, `tokens` (B, L, E), `real` (B, L) bool."""

    vector: Tensor
    tokens: Tensor
    real: Tensor

    def at(self, rows: Tensor) -> Side:
        """Only these rows, in this order."""
        return Side(self.vector[rows], self.tokens[rows], self.real[rows])


class TwoTowers(nn.Module):
    """Scores how well a text fits a picture.

    Args:
        side: pictures are (B, 3, side, side), side a multiple of 8: two convolutions with pooling
            bring them to a quarter, and 2 × 2 places of that are a token. Few pictures do not
            teach a linear patch what an edge is (Xiao et al. 2021, arXiv 2106.14881).
        vocabulary: how many words there are, PAD and UNKNOWN included.
    """

    def __init__(self, design: Design, side: int, vocabulary: int) -> None:
        super().__init__()
        width = design.embed_dim
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, width, 2, stride=2),
        )
        self.places = nn.Parameter(0.02 * torch.randn((side // PATCH) ** 2, width))
        self.picture_encoder = Encoder(design)
        self.embedding = nn.Embedding(vocabulary, width)
        self.word_encoder = Encoder(design, Rotary())
        self.picture_out = nn.Linear(width, width)
        self.word_out = nn.Linear(width, width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))
        self.crossing_norm = nn.LayerNorm(width)
        self.crossing = MultiHeadAttention(
            width,
            design.num_heads,
            num_kv_heads=design.num_kv_heads,
            head_dim=design.head_dim,
        )
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = Feedforward(design)
        self.dropout = nn.Dropout(design.dropout)
        self.judge = nn.Linear(width, 1)

    def see(self, images: Tensor) -> Side:
        """(B, 3, side, side) in [0, 1]."""
        patches = self.stem(2 * images - 1).flatten(2).transpose(1, 2)
        tokens = self.picture_encoder(patches + self.places)
        vector = functional.normalize(self.picture_out(tokens.mean(1)), dim=-1)
        return Side(vector, tokens, tokens.new_ones(tokens.shape[:2], dtype=torch.bool))

    def read(self, words: Tensor) -> Side:
        """(B, L) numbers of words, PAD after the end."""
        real = words != PAD
        tokens = self.word_encoder(self.embedding(words), padding(real))
        vector = functional.normalize(self.word_out(mean(tokens, real)), dim=-1)
        return Side(vector, tokens, real)

    @property
    def scale(self) -> Tensor:
        """What a cosine is multiplied by."""
        return self.log_scale.exp().clamp(max=LAST_SCALE)

    def alike(self, pictures: Side, texts: Side) -> Tensor:
        """Scores of the towers alone, each picture with each text: (B, T)."""
        return self.scale * pictures.vector @ texts.vector.T

    def fit(self, pictures: Side, texts: Side) -> Tensor:
        """Scores of the towers and the crossing, each picture with its own text: (B,)."""
        read = self.crossing(self.crossing_norm(texts.tokens), pictures.tokens)
        x = texts.tokens + self.dropout(read)
        x = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        together = self.scale * (pictures.vector * texts.vector).sum(-1)
        return together + self.judge(mean(x, texts.real))[:, 0]

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Images (B, 3, side, side) and words (B, L) → how well each pair fits, (B, 1)."""
        return self.fit(self.see(images), self.read(words))[:, None]

    def loss(self, images: Tensor, words: Tensor, names: Tensor) -> Tensor:
        """Each picture must find its text among those of the batch, and each text its picture; and
        the crossing must tell the text from the `HARD` others that the towers score highest.
        `names` (B,): equal numbers are equal texts, which are no mistake."""
        pictures, texts = self.see(images), self.read(words)
        scores = self.alike(pictures, texts)
        contrast = contrastive(scores, names)
        same = names[:, None] == names[None]
        count = min(HARD, len(names) - 1)
        wrong = scores.detach().masked_fill(same, -torch.inf).topk(count, dim=1).indices
        own = torch.arange(len(names), device=names.device)
        choices = torch.cat([own[:, None], wrong], 1)
        # The towers' own vectors learn from the contrast alone, not from these few hard texts.
        held = [Side(side.vector.detach(), side.tokens, side.real) for side in (pictures, texts)]
        fits = self.fit(
            held[0].at(own.repeat_interleave(1 + count)), held[1].at(choices.flatten())
        ).view(len(names), -1)
        # Where a batch has hardly any other text, equal ones would fill the places.
        equal = same.gather(1, choices)
        equal[:, 0] = False
        fits = fits.masked_fill(equal, -torch.inf)
        return contrast + functional.cross_entropy(fits, torch.zeros_like(own))


def mean(tokens: Tensor, real: Tensor) -> Tensor:
    """The mean of a row's real tokens: (B, L, E), (B, L) → (B, E)."""
    weight = real[..., None].to(tokens.dtype)
    return (tokens * weight).sum(1) / weight.sum(1)


def contrastive(scores: Tensor, names: Tensor) -> Tensor:
    """Cross-entropy over the rows and over the columns of (B, B) scores, halved. The targets of a
    row are all texts that equal its own, in equal shares."""
    same = (names[:, None] == names[None]).to(scores.dtype)
    share = same / same.sum(1, keepdim=True)
    return (functional.cross_entropy(scores, share) + functional.cross_entropy(scores.T, share)) / 2
