"""English text, a verse a line, by a decoder."""

from __future__ import annotations

from collections.abc import Callable

from headwise.errors import BadInput
from headwise.tasks.scripture import verses
from headwise.tasks.sources import fetch
from headwise.tasks.texts import Document, TextTask

BLOCK = 50


class Language(TextTask):
    """What comes next in English?"""

    name = "language"
    title = "What comes next in this English text?"
    source = "Debian sword-text-web: the World English Bible, 927,000 words of today's English"
    licence = "public domain"

    def documents(self, say: Callable[[str], None]) -> list[Document]:
        if self.data is None:
            lines = [line for line in verses(fetch("english-text", say=say)) if line]
        else:
            try:
                text = self.data.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not UTF-8 text"
                raise BadInput(f"{self.data}: cannot read text: {reason.lower()}") from None
            lines = [line for line in text.splitlines() if line.strip()]
        # Neighbouring lines stay together; of a short text fewer, so that some are held out.
        block = min(BLOCK, max(1, len(lines) // 20))
        return [lines[start : start + block] for start in range(0, len(lines), block)]
