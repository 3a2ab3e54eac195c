"""Models of text that write it on: what `language` and `code` share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise._extras import require
from headwise.errors import BadInput
from headwise.tasks.decoder import Decoder, draw, greedy
from headwise.tasks.design import Design
from headwise.tasks.ngram import NGram
from headwise.tasks.plain import fit
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Split, Task
from headwise.tasks.unattended import GatedRecurrent, Mixer

Document = list[str]  # its lines
BEGIN = 0
LENGTH = 128
BATCH = 16
WRITTEN = 60
MOST_CHARACTERS = 4_000_000
NOWHERE = -100


class TextTask(Task):
    """Text, by its documents. A subclass reads them, and may judge what the model writes."""

    metric = "bits per byte"
    better: Literal["higher", "lower"] = "lower"
    causal = True
    generates = True
    vocabulary = 1024
    held_out = 150

    @abstractmethod
    def documents(self, say: Callable[[str], None]) -> list[Document]:
        """Its own data or the person's, as lines; whole documents are held out."""

    def judge(self, model: nn.Module) -> dict[str, float]:
        """More about a model, from what it writes on the test part."""
        return {}

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        documents = [lines for lines in self.documents(say) if any(map(str.strip, lines))]
        if len(documents) < 10:
            raise BadInput(
                f"{self.name}: wanted text of 10 documents at least, to hold some out; got "
                f"{len(documents)}"
            )
        order = np.random.default_rng(self.seed).permutation(len(documents))
        share = max(1, len(documents) // 10)
        held = {"validation": order[:share], "test": order[share : 2 * share]}
        trained = _at_most([documents[row] for row in order[2 * share :]], MOST_CHARACTERS)
        self._learn_tokens(trained)
        text: list[int] = []
        starts: list[int] = []
        for lines in trained:
            for ids in self._encode_lines(lines):
                starts.append(len(text))
                text += ids
        if len(text) < 2 * LENGTH:
            raise BadInput(
                f"{self.name}: the training part has {len(text)} tokens, wanted {2 * LENGTH} at "
                "least; give more text"
            )
        self.text = np.array(text, dtype=np.int64)
        # A window may begin at any line that is followed by enough text.
        self.starts = np.array([s for s in starts if s + LENGTH <= len(text)], dtype=np.int64)
        self.parts = {
            name: self._pieces([documents[row] for row in sorted(rows)], name)
            for name, rows in held.items()
        }
        self.kept = self.parts["test"][0][0]

    def _learn_tokens(self, documents: Sequence[Document]) -> None:
        """Byte pairs, learned on the training part alone; every text can be written in them."""
        tokenizers = require("tokenizers", extra="tasks", purpose=self.name)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.vocabulary,
            special_tokens=["<begin>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(("\n".join(lines) for lines in documents), trainer)
        self.tokenizer = tokenizer

    def _encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, its end of line included."""
        coded = self.tokenizer.encode_batch([line + "\n" for line in lines])
        return [list(line.ids) for line in coded]

    def _pieces(self, documents: Sequence[Document], part: str) -> list[tuple[list[int], int]]:
        """Whole lines that together have at most LENGTH tokens, and their size in bytes; a longer
        line is left out. At most `held_out` of them, spread over all documents."""
        found: list[tuple[list[int], int]] = []
        for lines in documents:
            ids: list[int] = []
            size = 0
            for line, coded in zip(lines, self._encode_lines(lines), strict=True):
                if ids and len(ids) + len(coded) > LENGTH:
                    found.append((ids, size))
                    ids, size = [], 0
                if len(coded) <= LENGTH:
                    ids, size = ids + coded, size + len(line.encode()) + 1
            if ids:
                found.append((ids, size))
        if len(found) < 2:
            raise BadInput(
                f"{self.name}: {len(found)} pieces of text for {part}, wanted 2 at least"
            )
        rows = np.random.default_rng((self.seed, 1)).permutation(len(found))[: self.held_out]
        return [found[row] for row in sorted(rows)]

    def default_design(self) -> Design:
        return Design(embed_dim=128, num_heads=4, layers=2, feedforward=512, dropout=0.0)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 450, "full": 10000}[name]
        return Budget(
            steps=steps,
            batch_size=BATCH,
            learning_rate=4e-3,
            warmup=50,
            evaluate_every=steps // 4,
            patience=3,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Decoder(design, self.tokenizer.get_vocab_size())

    def batch(self, index: int, seed: int) -> Tensor:
        """(B, LENGTH) ids of windows that begin at lines drawn with equal chances."""
        rows = np.random.default_rng((seed, index)).integers(0, len(self.starts), BATCH)
        return torch.from_numpy(self.text[self.starts[rows][:, None] + np.arange(LENGTH)])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy of each id after those before it, the first after BEGIN."""
        return functional.cross_entropy(model(begun(batch)).flatten(0, 1), batch.flatten())

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, split: Split) -> Score:
        """Bits of a part, by its size in bytes; each piece is read by itself, from its beginning.
        For each piece: its bits, by the mean size, so that the mean over pieces is the value."""
        model.eval()
        bits: list[float] = []
        pieces = self.parts[split]
        for first in range(0, len(pieces), 50):
            ids = padded([ids for ids, _ in pieces[first : first + 50]])
            logits = model(begun(ids.clamp_min(0)))
            each = functional.cross_entropy(
                logits.transpose(1, 2), ids, ignore_index=NOWHERE, reduction="none"
            )
            bits += (each.sum(1) / math.log(2)).tolist()
        mean = sum(size for _, size in pieces) / len(pieces)
        each_piece = np.array(bits) / mean
        more = self.judge(model) if split == "test" else {}
        return Score(float(each_piece.mean()), each_piece, more)

    def baselines(self) -> dict[str, Callable[[], Score]]:
        width, words = self.default_design().embed_dim, self.tokenizer.get_vocab_size()

        def counted(order: int) -> Callable[[], Score]:
            return lambda: self.evaluate(NGram(self.text, order, words), "test")

        def trained(build: Callable[[], nn.Module]) -> Callable[[], Score]:
            steps = self.budget().steps
            return lambda: self.evaluate(
                fit(build, self.loss, lambda index: self.batch(index, 0), steps=steps), "test"
            )

        return {
            "2-gram": counted(2),
            "4-gram": counted(4),
            "GRU": trained(lambda: GatedRecurrent(words, width)),
            "mixer without attention": trained(lambda: Mixer(self.default_design(), words, LENGTH)),
        }

    def example(self) -> dict[str, Any]:
        ids = [BEGIN, *self.kept][:LENGTH]
        names = [self.tokenizer.decode([i]) if i else "<begin>" for i in ids]
        return {"inputs": {"ids": torch.tensor([ids])}, "tokens": names}

    def decode_step(self, model: nn.Module) -> Callable[[], Any]:
        assert isinstance(model, Decoder)
        ids = self.example()["inputs"]["ids"]
        caches = model.make_caches(1, ids.shape[1] + 1)
        model(ids, caches)

        def step() -> None:
            for cache in caches:
                cache.crop(ids.shape[1])
            model(ids[:, -1:], caches)

        return step

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.to_str(), "kept": list(self.kept)}

    def restore(self, state: dict[str, Any]) -> None:
        tokenizers = require("tokenizers", extra="tasks", purpose=self.name)
        self.tokenizer = tokenizers.Tokenizer.from_str(state["tokenizer"])
        self.kept = [int(i) for i in state["kept"]]

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Each text given, written on: the likeliest, and one drawn. None: the example's begin."""
        lines: list[str] = []
        for prompt in args.given or (self.tokenizer.decode(self.kept[:20]),):
            ids = torch.tensor([[BEGIN, *self.tokenizer.encode(prompt).ids]])
            if ids.shape[1] == 1:
                raise BadInput(f"{self.name}: wanted the beginning of a text, got {prompt!r}")
            lines.append(prompt)
            for name, found in (
                ("likeliest", greedy(model, ids, WRITTEN)),
                ("drawn", draw(model, ids, WRITTEN)),
            ):
                lines.append(f"  {name + ':':<11}{self.tokenizer.decode(found[0].tolist())}")
        return RunOutput(tuple(lines))


def begun(ids: Tensor) -> Tensor:
    """(B, L) → (B, L): BEGIN before each row, its last id left out."""
    return functional.pad(ids, (1, -1), value=BEGIN)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, longest) ids, NOWHERE on the right."""
    found = torch.full((len(rows), max(map(len, rows))), NOWHERE)
    for row, ids in enumerate(rows):
        found[row, : len(ids)] = torch.tensor(ids)
    return found


def _at_most(documents: list[Document], characters: int) -> list[Document]:
    """The first documents, as many as have so many characters together; one at least."""
    sizes = np.cumsum([sum(map(len, lines)) for lines in documents])
    return documents[: max(1, int(np.searchsorted(sizes, characters)))]
