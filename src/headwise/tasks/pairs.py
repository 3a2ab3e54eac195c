"""Pairs of lines, one into the other: what translation and summarisation share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise._extras import require
from headwise.errors import BadInput
from headwise.tasks.design import Design
from headwise.tasks.plain import fit
from headwise.tasks.seq2seq import BEGIN, END, PAD, Seq2Seq, beam, cut, greedy
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Split, Task

Pair = tuple[str, str]
Batch = tuple[dict[str, Tensor], Tensor]
BLOCK = 40


def read_pairs(path: Path) -> list[Pair]:
    """The lines of a file of two columns with a tab between them; empty lines are passed over.

    Raises:
        BadInput: the file and line, and what is wrong there.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(f"{path}: cannot read pairs: {reason.lower()}") from None
    found: list[Pair] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != 2 or not all(cells):
            raise BadInput(
                f"{path}, line {number}: wanted two columns with a tab between them, got "
                f"{len(cells)} in {line[:60]!r}"
            )
        found.append((cells[0], cells[1]))
    if len(found) < 10 * BLOCK // 4:
        raise BadInput(
            f"{path}: {len(found)} pairs; {10 * BLOCK // 4} at least are needed to train and test"
        )
    return found


def in_blocks(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Neighbours stay together, up to 40 of them."""
    block = min(BLOCK, max(1, len(pairs) // 20))
    return [list(pairs[start : start + block]) for start in range(0, len(pairs), block)]


def split_groups(groups: Sequence[list[Pair]], seed: int) -> dict[str, list[Pair]]:
    """Whole groups go to training (8 of 10), validation or test, and what is left out of training
    is never in it by the same source line."""
    order = np.random.default_rng(seed).permutation(len(groups))
    share = max(1, len(groups) // 10)
    chosen = {
        "validation": order[:share],
        "test": order[share : 2 * share],
        "train": order[2 * share :],
    }
    parts = {
        name: [pair for index in sorted(rows) for pair in groups[index]]
        for name, rows in chosen.items()
    }
    trained = {source for source, _ in parts["train"]}
    for name in ("validation", "test"):
        parts[name] = [pair for pair in parts[name] if pair[0] not in trained]
        if len(parts[name]) < 2:
            raise BadInput(f"pairs: {len(parts[name])} source lines of {name} are not in training")
    return parts


class PairTask(Task):
    """One line in, one line out. A subclass reads its pairs and scores what was written."""

    causal = True  # in what it writes
    generates = True
    vocabulary = 3000
    longest = 40
    held_out = 100
    first: Tensor | None = None

    @abstractmethod
    def groups(self, say: Callable[[str], None]) -> list[list[Pair]]:
        """Its own data, by what is held out together."""

    def reads(self, line: str) -> str:
        """A source line as the model reads it."""
        return line

    def lexicon(self) -> Tensor | None:
        """How source ids begin, for `Seq2Seq`; None: each as itself."""
        return None

    @abstractmethod
    def judge(self, written: list[str], wanted: list[str]) -> Score:
        """The metric over all lines, and for each."""

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        groups = self.groups(say) if self.data is None else in_blocks(read_pairs(self.data))
        self.parts = split_groups(groups, self.seed)
        for name in ("validation", "test"):
            rows = np.random.default_rng((self.seed, 1)).permutation(len(self.parts[name]))
            self.parts[name] = [self.parts[name][row] for row in sorted(rows[: self.held_out])]
        tokenizers = require("tokenizers", extra="tasks", purpose=self.name)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<?>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        tokenizer.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.vocabulary,
            special_tokens=["<pad>", "<begin>", "<end>", "<?>"],
            show_progress=False,
        )
        # The vocabulary is learned from training lines alone.
        tokenizer.train_from_iterator(
            (line for a, b in self.parts["train"] for line in (self.reads(a), b)), trainer
        )
        self.tokenizer = tokenizer
        self.kept = self.parts["test"][0]
        self.coded = [(self.encode(self.reads(a)), self.encode(b)) for a, b in self.parts["train"]]
        self.first = self.lexicon()

    def encode(self, line: str) -> list[int]:
        """At most `longest` ids, without BEGIN and END."""
        return list(self.tokenizer.encode(line).ids[: self.longest])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids))).strip()

    def default_design(self) -> Design:
        return Design(embed_dim=128, num_heads=4, layers=2, feedforward=256, dropout=0.1)

    def budget(self, name: str = "quick") -> Budget:
        steps = {"quick": 500, "full": 6000}[name]
        return Budget(
            steps=steps,
            batch_size=48,
            learning_rate=3e-3,
            warmup=50,
            evaluate_every=steps // 2,
            patience=4,
        )

    def build(self, design: Design, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Seq2Seq(design, self.tokenizer.get_vocab_size(), self.first)

    def batch(self, index: int, seed: int) -> Batch:
        """What the model takes of 48 pairs drawn with equal chances, and the next ids (48, T)."""
        rows = np.random.default_rng((seed, index)).integers(0, len(self.coded), 48)
        return collate([self.coded[row] for row in rows])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the next id, smoothed by 0.1 in training (Szegedy et al. 2016)."""
        given, wanted = batch
        logits = model(**given)
        return functional.cross_entropy(
            logits.flatten(0, 1),
            wanted.flatten(),
            ignore_index=PAD,
            label_smoothing=0.1 if model.training else 0.0,
        )

    def evaluate(self, model: nn.Module, split: Split) -> Score:
        pairs = self.parts[split]
        return self.judge(self.write(model, [a for a, _ in pairs]), [b for _, b in pairs])

    def write(self, model: nn.Module, lines: Sequence[str]) -> list[str]:
        """What the model makes of each line, greedily."""
        written: list[str] = []
        for start in range(0, len(lines), 50):
            given, _ = collate(
                [(self.encode(self.reads(line)), []) for line in lines[start : start + 50]]
            )
            source, real = given["src"], ~given["src_key_padding_mask"]
            if isinstance(model, Seq2Seq):
                found = greedy(model, source, real, self.longest)
            else:
                assert isinstance(model, Recurrent)
                found = model.write(source, real, self.longest)
            written += [self.decode(ids) for ids in found]
        return written

    def recurrent(self) -> Score:
        """A GRU encoder and decoder without attention, trained for as many steps."""

        def build() -> nn.Module:
            return Recurrent(self.tokenizer.get_vocab_size(), self.default_design().embed_dim)

        model = fit(build, self.loss, lambda index: self.batch(index, 0), steps=self.budget().steps)
        return self.evaluate(model, "test")

    def example(self) -> dict[str, Any]:
        source, target = self.encode(self.reads(self.kept[0])), self.encode(self.kept[1])
        given, _ = collate([(source, target)])
        return {"inputs": given, "tokens": [self.tokenizer.id_to_token(i) for i in source]}

    def decode_step(self, model: nn.Module) -> Callable[[], Any]:
        assert isinstance(model, Seq2Seq)
        given = self.example()["inputs"]
        length = given["tgt"].shape[1]
        memory = model.remember(given["src"], ~given["src_key_padding_mask"], length + 1)
        for place in range(length):
            model.step(given["tgt"][:, place], memory)

        def step() -> None:
            for cache in memory.caches:
                cache.crop(length)
            model.step(given["tgt"][:, -1], memory)

        return step

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.to_str(), "kept": list(self.kept)}

    def restore(self, state: dict[str, Any]) -> None:
        tokenizers = require("tokenizers", extra="tasks", purpose=self.name)
        self.tokenizer = tokenizers.Tokenizer.from_str(state["tokenizer"])
        self.kept = (str(state["kept"][0]), str(state["kept"][1]))

    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Each line given, by greedy search and by beam search; none: a line of the test part."""
        assert isinstance(model, Seq2Seq)
        lines: list[str] = []
        for line in args.given or (self.kept[0],):
            ids = self.encode(self.reads(line))
            if not ids:
                raise BadInput(f"{self.name}: wanted a line of text, got {line!r}")
            found = beam(model, torch.tensor(ids), self.longest)
            lines += [line, f"  greedy: {self.write(model, [line])[0]}"]
            lines.append(f"  beam:   {self.decode(found)}")
        return RunOutput(tuple(lines))


def collate(pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """What `Seq2Seq` takes: `src` (B, S), `src_key_padding_mask` (B, S), `tgt` (B, T), which begins
    with BEGIN; and what comes next (B, T), which ends with END. PAD fills the right."""
    width = max(len(source) for source, _ in pairs)
    height = 1 + max(len(target) for _, target in pairs)
    source = torch.full((len(pairs), width), PAD)
    target, wanted = (torch.full((len(pairs), height), PAD) for _ in range(2))
    for row, (a, b) in enumerate(pairs):
        source[row, : len(a)] = torch.tensor(a, dtype=torch.long)
        target[row, : 1 + len(b)] = torch.tensor([BEGIN, *b])
        wanted[row, : 1 + len(b)] = torch.tensor([*b, END])
    return {"src": source, "tgt": target, "src_key_padding_mask": source == PAD}, wanted


class Recurrent(nn.Module):
    """A GRU reads the source, another writes from its last state: no attention anywhere."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.reader = nn.GRU(width, width, batch_first=True)
        self.writer = nn.GRU(width, width, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        """As `Seq2Seq.forward`."""
        written, _ = self.writer(self.embedding(tgt), self.read(src, ~src_key_padding_mask))
        return written @ self.embedding.weight.T

    def read(self, source: Tensor, real: Tensor) -> Tensor:
        """The state at each row's last real token, (1, B, E)."""
        states, _ = self.reader(self.embedding(source))
        last = real.sum(1).clamp_min(1) - 1
        return states[torch.arange(len(source)), last][None]

    @torch.inference_mode()
    def write(self, source: Tensor, real: Tensor, limit: int) -> list[list[int]]:
        """Greedily, as `seq2seq.greedy`."""
        state, token = self.read(source, real), torch.full((len(source), 1), BEGIN)
        ids: list[Tensor] = []
        for _ in range(limit):
            written, state = self.writer(self.embedding(token), state)
            token = (written @ self.embedding.weight.T).argmax(-1)
            ids.append(token)
        return [cut(row) for row in torch.cat(ids, dim=1).tolist()]
