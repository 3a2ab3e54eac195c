"""`headwise whatif`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput


@app.command()
def whatif(
    model: Annotated[str, typer.Argument(help="A causal language model, as for report.")],
    text_file: Annotated[Path, typer.Option(help="UTF-8 text to measure on.")],
    prune: Annotated[
        str, typer.Option(help="Shares of heads to remove, least important first; '' for none.")
    ] = "0.1,0.2,0.4",
    kv_heads: Annotated[
        str, typer.Option(help="Key/value heads to share down to, parted by commas.")
    ] = "",
    heal: Annotated[int, typer.Option(help="Steps of fine-tuning after each change.")] = 0,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    windows: Annotated[int, typer.Option(help="Windows to measure on.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Picture: .png, .svg or .pdf.")] = None,
    records: Annotated[Path | None, typer.Option(help="Also write the records.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 …")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps …")] = "cpu",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """What fewer heads would cost and save: perplexity, latency, KV cache, beside the original."""
    import torch
    from rich.table import Table

    from headwise import models
    from headwise.models.text import encode
    from headwise.record import check_writable, write
    from headwise.surgery.picture import draw
    from headwise.surgery.what_if import what_if

    shares, counts = _numbers("--prune", prune, float), _numbers("--kv-heads", kv_heads, int)
    if out is not None and out.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--out: {out} must end in .png, .svg or .pdf")
    for path in (out, records):
        if path is not None:
            check_writable(path)
    text = models.read_text(text_file)
    with working(f"loading {model}") as work:
        loaded = models.load(model, dtype=dtype, device=device, say=work.say)
        if loaded.kind != "causal":
            raise BadInput(f"{model}: whatif measures causal language models, not {loaded.kind}")
        # As many characters as could ever be needed, so that a whole book is not tokenised.
        ids, _ = encode(loaded.processor, text[: 400 * context * windows], special=False)

        def progress(done: int, total: int, line: str) -> None:
            work.update(done, total, line)
            if work.hidden:
                work.say(line)

        rows = what_if(
            loaded.model,
            torch.tensor(ids),
            prune=[float(s) for s in shares],
            kv_heads=[int(c) for c in counts],
            context=context,
            windows=windows,
            heal_steps=heal,
            say=progress,
        )
    if records is not None:
        write(records, [row.record() for row in rows])
    if out is not None:
        draw(rows, out, title=f"{model}: what if it had fewer heads")
    table = Table(title=f"{model}, {windows} windows of {context} tokens", title_justify="left")
    for name in ("variant", "perplexity", "prefill ms", "decode ms", "KV MiB", "parameters"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.perplexity:.4g}",
            f"{row.prefill_ms:.0f}",
            f"{row.decode_ms:.1f}",
            f"{row.kv_bytes / 2**20:.2f}",
            f"{row.parameters / 1e6:.1f}M",
        )
    console = terminal()
    console.print(table)
    for path in (out, records):
        if path is not None:
            console.print(f"wrote {path}", highlight=False)


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[int | float]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise BadInput(f"{option}: wanted numbers parted by commas, got {text!r}") from None
