"""The text that `whatif` and `profile` measure perplexity on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise.errors import HeadwiseError

ENGLISH = "english-text"


def read(text_file: Path | None, say: Callable[[str], None]) -> tuple[str, str]:
    """(the text, its name): a person's file, or else the World English Bible, fetched once.

    Raises:
        BadInput: the file cannot be read. HeadwiseError: the text could not be fetched.
    """
    from headwise import models

    if text_file is not None:
        return models.read_text(text_file), text_file.name
    from headwise.tasks.scripture import verses
    from headwise.tasks.sources import fetch

    try:
        folder = fetch(ENGLISH, say=say)
    except HeadwiseError as error:
        reason = str(error).split(";")[0]
        raise HeadwiseError(f"{reason}; --text-file measures on a text of your own") from None
    return "\n".join(verse for verse in verses(folder) if verse), ENGLISH
