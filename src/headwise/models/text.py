"""Text to tokens, and the `axis` of a text: readable tokens, character offsets, words."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import BadInput
from headwise.models.loaded import AxisValues, Inputs

# A word is a run of letters and digits (an apostrophe inside stays), else one other visible
# character. Scripts written without spaces count each character: Japanese kana and Han.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+(?:['’](?:(?![{_UNSPACED}])\w)+)*|\S")

# These count positions from the padding index, so the first pad_token_id + 1 of the table are
# unused.
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "longformer", "mpnet"}


def positions_limit(config: Any) -> int | None:
    """How many tokens the model has positions for, or None where they are relative and
    unbounded."""
    # Relative positions: their config's number, where there is one, is a tokenizer's habit.
    if getattr(config, "relative_attention_num_buckets", None) is not None:
        return None
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            if getattr(config, "model_type", "") in _OFFSET_POSITIONS:
                value -= (getattr(config, "pad_token_id", None) or 0) + 1
            return value
    return None


def word_indices(text: str, starts: list[int], ends: list[int]) -> list[int]:
    """For each token the index of the word that it is a piece of; -1 for a token with no text.

    A token belongs to the word of its first visible character; one of white space only is a word of
    its own. Indices count up from 0 in the order of the tokens.
    """
    owner: dict[int, int] = {}
    for word in _WORD.finditer(text):
        for position in range(word.start(), word.end()):
            owner[position] = word.start()
    words: list[int] = []
    last: object = None
    count = -1
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start < 0:
            words.append(-1)
            continue
        visible = next((owner[p] for p in range(start, end) if p in owner), None)
        word_key: object = ("blank", number) if visible is None else visible
        if word_key != last:
            count, last = count + 1, word_key
        words.append(count)
    return words


def special_ids(tokenizer: Any) -> set[int]:
    """The tokens that stand for no text: those with a role (start, end, padding …) and those added
    to the vocabulary as special, such as chat markers."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def text_axis(
    tokenizer: Any, text: str, ids: list[int], offsets: list[tuple[int, int]]
) -> AxisValues:
    """The `axis` record's values for one tokenised text.

    Tokens are shown as the text they stand for, with the leading space that many vocabularies fold
    into them; special tokens by their name. `offsets` are (start, end) into `text`.
    """
    specials = special_ids(tokenizer)
    names = tokenizer.convert_ids_to_tokens(ids)
    tokens: list[str] = []
    special: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    for token, name, (start, end) in zip(ids, names, offsets, strict=True):
        piece = text[start:end]
        # A special token that the text itself spells out has a place in it, and is still special.
        special.append(int(token in specials))
        if not piece:
            tokens.append(str(name))
            starts.append(-1)
            ends.append(-1)
            continue
        folded = str(name).startswith(("Ġ", "▁")) and start > 0 and text[start - 1] == " "
        tokens.append(" " + piece if folded and not piece[0].isspace() else piece)
        starts.append(start)
        ends.append(end)
    return {
        "kind": "text",
        "tokens": tokens,
        "special": special,
        "real": [1] * len(ids),
        "text": text,
        "starts": starts,
        "ends": ends,
        "words": word_indices(text, starts, ends),
    }


def positions_axis(count: int) -> AxisValues:
    """An axis of `count` positions that have no text of their own: their numbers, from 0."""
    names = [str(number) for number in range(count)]
    starts: list[int] = []
    place = 0
    for name in names:
        starts.append(place)
        place += len(name) + 1
    return {
        "kind": "text",
        "tokens": names,
        "special": [0] * count,
        "real": [1] * count,
        "text": " ".join(names),
        "starts": starts,
        "ends": [start + len(name) for start, name in zip(starts, names, strict=True)],
        "words": list(range(count)),
    }


def encode(
    tokenizer: Any, text: str, *, special: bool = True
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and their (start, end) character offsets. Nothing is cut, nothing is padded.

    Raises:
        BadInput: the text holds no visible character.
    """
    if not text.strip():
        raise BadInput("the text is empty: give at least one word")
    if tokenizer.is_fast:
        # verbose=False: transformers' own warning about length; `check_length` says it with
        # numbers.
        found = tokenizer(
            text,
            truncation=False,
            padding=False,
            add_special_tokens=special,
            return_offsets_mapping=True,
            verbose=False,
        )
        return list(found["input_ids"]), [(int(a), int(b)) for a, b in found["offset_mapping"]]
    ids = list(tokenizer(text, truncation=False, add_special_tokens=special)["input_ids"])
    return ids, _search_offsets(tokenizer, text, ids)


def _search_offsets(tokenizer: Any, text: str, ids: list[int]) -> list[tuple[int, int]]:
    """Offsets for tokenizers written in Python, which report none: each piece is searched in
    turn."""
    offsets: list[tuple[int, int]] = []
    cursor = 0
    specials = special_ids(tokenizer)
    for token in ids:
        piece = "" if token in specials else tokenizer.decode([token]).strip()
        found = text.find(piece, cursor) if piece else -1
        # Far ahead means another occurrence: the piece was normalised and is not there as such.
        if piece and 0 <= found <= cursor + 8:
            cursor = found + len(piece)
            offsets.append((found, cursor))
        else:
            offsets.append((0, 0))
    return offsets


def check_length(count: int, limit: int | None, what: str) -> None:
    """Raise where `count` tokens are more than the model has positions for.

    Raises:
        BadInput: with both numbers.
    """
    if limit is not None and count > limit:
        raise BadInput(
            f"the text has {count:,} tokens and {what} has positions for {limit:,}: shorten it by "
            f"at least {count - limit:,} tokens (about {100 * (count - limit) / count:.0f} %), or "
            "use a model with a longer context"
        )


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        BadInput: the file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None


class TextPreparer:
    """Text for a causal model or an encoder: one sequence, no padding, so no padding mask
    either."""

    takes: tuple[str, ...] = ("text",)

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer = tokenizer
        self.name = name

    def __call__(self, model: nn.Module, **given: Any) -> Inputs:
        text = given.get("text")
        if text is None:
            raise BadInput(f"{self.name} reads text: give --text TEXT or --file FILE")
        ids, offsets = encode(self.tokenizer, text)
        check_length(len(ids), positions_limit(model.config), self.name)
        accepted = inspect.signature(model.forward).parameters
        kwargs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if "use_cache" in accepted:
            kwargs["use_cache"] = False
        if "logits_to_keep" in accepted:
            kwargs["logits_to_keep"] = 1
        axis = text_axis(self.tokenizer, text, ids, offsets)
        return Inputs("text", {"text": axis}, {"": "text"}, kwargs)
