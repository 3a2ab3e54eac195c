"""`headwise profile`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput

if TYPE_CHECKING:
    from headwise.profile.quality import Quality
    from headwise.profile.run import Profile
    from headwise.profile.shapes import Shape

UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@app.command()
def profile(
    model: Annotated[
        str | None,
        typer.Argument(help="As for report, or leave it out and describe attention by options."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Context lengths, parted by commas; 8k is 8,192. If not given, 512,2k,8k, or the "
            "patches of a vision model's own picture."
        ),
    ] = None,
    embed_dim: Annotated[int | None, typer.Option(help="Features of a token.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Features of a head.")] = None,
    layers: Annotated[int, typer.Option(help="Attention layers.")] = 1,
    window: Annotated[int | None, typer.Option(help="Keys that a query looks back over.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32; default: as stored.")] = None,
    cache: Annotated[
        str, typer.Option(help="plain, int8, or plain,int8: one beside the other.")
    ] = "plain",
    text_file: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text for the int8 cache's perplexity; if not given, the World English "
            "Bible."
        ),
    ] = None,
    attention: Annotated[str, typer.Option(help="headwise, sdpa or eager.")] = "headwise",
    compare: Annotated[str | None, typer.Option(help="Another model, beside it.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--count-only", help="Run the model, or only count.")
    ] = True,
    beyond_trained: Annotated[
        bool, typer.Option("--beyond-trained", help="Contexts beyond the model's positions too.")
    ] = False,
    memory: Annotated[str | None, typer.Option(help="How far does it reach? 16GiB …")] = None,
    latency: Annotated[str | None, typer.Option(help="How far does a prefill? 500ms, 2s …")] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write a table of all numbers.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw: .png, .svg or .pdf.")] = None,
    records: Annotated[Path | None, typer.Option(help="Also write the records.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = "cpu",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure.")
    ] = False,
) -> None:
    """What attention costs as context grows: counted exactly, and measured in fresh processes."""
    from headwise.profile.picture import draw
    from headwise.profile.run import profile as run
    from headwise.profile.run import share_out, to_csv
    from headwise.profile.worker import picture_side
    from headwise.record import Record, check_writable, write, write_text
    from headwise.report import write_report

    given = [_size("--contexts", part, 1) for part in (contexts or "").split(",") if part.strip()]
    budget = None if memory is None else _size("--memory", memory, 1)
    wait = None if latency is None else _seconds(latency)
    caches = list(dict.fromkeys(part.strip() for part in cache.split(",")))
    if not set(caches) <= {"plain", "int8"}:
        raise BadInput(f"--cache: wanted plain, int8 or plain,int8, got {cache!r}")
    if "int8" in caches and attention != "headwise":
        raise BadInput(f"--cache int8 is read by headwise's attention, not by {attention}")
    if text_file is not None and not (model and measure and "int8" in caches):
        raise BadInput("--text-file is for --cache int8 of a model that is measured")
    if attention not in ("headwise", "sdpa", "eager"):
        raise BadInput(f"--attention: wanted headwise, sdpa or eager, got {attention!r}")
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--picture: {picture} must end in .png, .svg or .pdf")
    for path in (csv, picture, records, html):
        if path is not None:
            check_writable(path)
    kind = None if dtype is None else DTYPES.get(dtype, dtype)
    if model is None and num_heads is None:
        raise BadInput("profile: name a model, or describe attention: --num-heads, --head-dim …")
    found: list[Profile] = []
    with working("reading the model") as work:

        def say(done: int, total: int, line: str) -> None:
            work.update(done, total, line)
            if work.hidden:
                work.say(line)

        subjects = []
        for source in [model] if compare is None else [model, compare]:
            if source is None:
                assert num_heads is not None
                from headwise.profile import from_options

                shape = from_options(
                    num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                    embed_dim=embed_dim, layers=layers, window=window,
                )  # fmt: skip
                subjects.append(Subject(shape, "float32"))
            else:
                subjects.append(_read(source, kind, work.say))
        # What can be refused is refused before minutes are spent on measuring.
        pictures = {one.picture for one in subjects if one.picture is not None}
        lengths = given or sorted(pictures) or [512, 2048, 8192]
        mine = share_out([one.shape for one in subjects], lengths, beyond_trained)
        for one, fitting in zip(subjects, mine, strict=True):
            _known(kind or one.stored)
            if one.picture is not None and measure:
                for tokens in fitting:
                    picture_side(one.config, tokens)
            if "int8" in caches and measure and one.source is not None and not one.decodes:
                raise BadInput(f"--cache int8: {one.shape.name} keeps no cache of what it read")
            if budget is not None:
                for held in caches:
                    run(one.shape, [1], batch=batch, dtype=kind or one.stored, cache=held,
                        beyond_trained=True).memory_lines(budget)  # fmt: skip
        text = None
        if "int8" in caches and measure and any(one.source for one in subjects):
            from headwise.cli.texts import read as read_text

            text = read_text(text_file, work.say)
        for one, fitting in zip(subjects, mine, strict=True):
            name, source = kind or one.stored, one.source if measure else None
            machine = None if source is None else _machine(name, device)
            quality = None
            if source is not None and text is not None:
                quality = _quality(source, name, device, text, work.say)
            for held in caches:
                found.append(
                    run(
                        one.shape, fitting, source=source, batch=batch, dtype=name, device=device,
                        attention=attention, cache=held, machine=machine,
                        beyond_trained=beyond_trained, say=say,
                    )
                )  # fmt: skip
                found[-1].left_out = [n for n in sorted(set(lengths)) if n not in fitting]
                found[-1].quality = quality
    console = terminal()
    refused: BadInput | None = None
    for profiled in found:
        _print(console, profiled)
        if budget is not None:
            console.print(*profiled.memory_lines(budget), sep="\n", highlight=False)
        if wait is not None:
            try:
                console.print(profiled.latency_line(wait), highlight=False)
            except BadInput as error:  # known only now; what was measured is kept
                refused = error
    every = [r for one in found for r in one.records()]
    if records is not None or html is not None:
        facts = Record("run", {}, {"model": " beside ".join(one.name for one in found)})
        if records is not None:
            write(records, [facts, *every])
        if html is not None:
            write_report([facts, *every], html)
    if csv is not None:
        write_text(csv, [to_csv(found)])
    if picture is not None:
        draw(found, picture)
    for path in (csv, picture, records, html):
        if path is not None:
            console.print(f"wrote {path}", highlight=False, markup=False)
    if refused is not None:
        raise refused


@dataclass(frozen=True)
class Subject:
    """What is profiled: its shape, its stored dtype, what `models.load` loads (None: it cannot be
    measured), whether it decodes upon a cache that may be int8, the tokens of its own picture where
    it reads pictures, its config."""

    shape: Shape
    stored: str
    source: str | None = None
    decodes: bool = False
    picture: int | None = None
    config: Any = None


def _read(source: str, dtype: str | None, say: Any) -> Subject:
    from headwise import models
    from headwise.profile import from_config
    from headwise.profile.worker import own_picture

    loaded = models.load(source, dtype=dtype, say=say)
    config = getattr(loaded.model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise BadInput(
            f"profile: {source} has no Hugging Face config to read its attention from; describe it "
            "by --num-heads, --head-dim, --layers"
        )
    stored = str(loaded.dtype).removeprefix("torch.")
    shape = from_config(config, loaded.name)
    return Subject(
        shape=shape,
        stored=stored,
        source=None if loaded.kind == "module" else source,
        decodes=loaded.kind == "causal",
        picture=own_picture(config) if loaded.kind == "vision" else None,
        config=config,
    )


def _quality(source: str, dtype: str, device: str, text: tuple[str, str], say: Any) -> Quality:
    import torch

    from headwise import models
    from headwise.models.text import encode
    from headwise.profile.quality import cache_quality

    loaded = models.load(source, dtype=dtype, device=device, say=say)
    # Enough for windows from different places, without tokenising a whole book.
    ids, _ = encode(loaded.processor, text[0][:400_000], special=False)
    return cache_quality(loaded.model, torch.tensor(ids), text=text[1], say=say)


def _machine(dtype: str, device: str) -> Any:
    import torch

    from headwise.profile.machine import measure

    return measure(getattr(torch, dtype), torch.device(device))


def _known(dtype: str) -> None:
    from headwise.profile.analytic import BYTES

    if dtype not in BYTES or dtype == "int8":
        raise BadInput(f"--dtype: wanted bf16, fp16, fp32 or fp64, got {dtype!r}")


def _print(console: Any, one: Profile) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from headwise.profile.run import words

    shape = one.shape
    title = (
        f"{one.name}: {len(shape.layers)} attention layers, {shape.parameters / 1e6:,.1f} M "
        f"parameters, {one.dtype}, batch {one.batch}"
    )
    console.print(title, highlight=False, markup=False)

    def rows(title: str, names: list[str], lines: list[list[str]]) -> None:
        table = Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False,
            collapse_padding=True,
        )  # fmt: skip
        for name, *cells in zip(names, *lines, strict=False):
            # Only headings take more than one line: a number is never cut.
            widest = max(map(len, [*cells, *name.split()]))
            table.add_column(fill(name, widest), justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        console.print(table)

    def length(context: int) -> str:
        return f"{context:,}" + ("*" if context in one.beyond else "")

    rows(
        "counted",
        ["context", "attention FLOP", "rest FLOP", "KV cache", "peak", "with whole maps"],
        [
            [length(c.context), _flop(c.attention_flops), _flop(c.other_flops),
             words(c.kv_bytes), words(c.fused_peak),
             words(c.fused_peak - c.fused_bytes + c.materialised_bytes)]
            for c in one.counted
        ],
    )  # fmt: skip
    if one.measured:
        lines = []
        for m in one.measured:
            limit = one.roofline(m)
            assert limit is not None
            cells = [length(m.context), words(m.peak), f"{m.prefill:.3g} ± {m.spread / 2:.2g}",
                    f"{m.attention_share:.0%}", f"{limit[0]:.0%}"]  # fmt: skip
            if m.decode is not None and limit[1] is not None:
                ms = 1e3 * m.decode
                cells += [f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}", f"{limit[1]:.0%}"]
            lines.append(cells)
        names = ["context", "peak", "prefill s", "attention", "of matrix rate"]
        if any(m.decode is not None for m in one.measured):
            names += ["token ms", "of read rate"]
        rows("measured", names, lines)
    if one.beyond:
        console.print(f"* beyond the {shape.positions:,} positions that the model was made for")
    for line in (*one.growth_lines(), *one.notes()):
        console.print(line, highlight=False, markup=False)
    if one.machine is not None:
        console.print(
            f"this machine ({one.machine.device}, {one.machine.threads} threads): matrix product "
            f"{one.machine.flops / 1e9:,.0f} GFLOP/s, read {one.machine.read / 1e9:,.1f} GB/s",
            highlight=False,
        )


def _flop(count: float) -> str:
    """Operations in thousands' steps: "275.1 G", "4.504 P"."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g} E"


def _size(option: str, text: str, least: int) -> int:
    match = re.fullmatch(r"\s*([\d_]+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    number = float(match[1]) * UNITS[match[2]] if match else 0
    if number < least:
        raise BadInput(f"{option}: wanted a number such as 512, 8k or 16GiB, got {text.strip()!r}")
    return int(number)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text.lower())
    if not match or float(match[1]) == 0:
        raise BadInput(f"--latency: wanted a time such as 500ms or 2s, got {text.strip()!r}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)
