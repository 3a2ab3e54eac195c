"""`headwise profile`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.common import app, working
from headwise.cli.common import console as terminal
from headwise.errors import BadInput

if TYPE_CHECKING:
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
        str, typer.Option(help="Context lengths, parted by commas; 8k is 8,192.")
    ] = "512,2k,8k",
    embed_dim: Annotated[int | None, typer.Option(help="Features of a token.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Key/value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Features of a head.")] = None,
    layers: Annotated[int, typer.Option(help="Attention layers.")] = 1,
    window: Annotated[int | None, typer.Option(help="Keys that a query looks back over.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32; default: as stored.")] = None,
    cache: Annotated[str, typer.Option(help="plain or int8.")] = "plain",
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
    from headwise.profile.run import to_csv
    from headwise.record import Record, check_writable, write, write_text
    from headwise.report import write_report

    lengths = [_size("--contexts", part, 1) for part in contexts.split(",") if part.strip()]
    budget = None if memory is None else _size("--memory", memory, 1)
    wait = None if latency is None else _seconds(latency)
    if cache not in ("plain", "int8"):
        raise BadInput(f"--cache: wanted plain or int8, got {cache!r}")
    if cache == "int8" and attention != "headwise":
        raise BadInput(f"--cache int8 is read by headwise's attention, not by {attention}")
    if attention not in ("headwise", "sdpa", "eager"):
        raise BadInput(f"--attention: wanted headwise, sdpa or eager, got {attention!r}")
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--picture: {picture} must end in .png, .svg or .pdf")
    for path in (csv, picture, records, html):
        if path is not None:
            check_writable(path)
    kind = None if dtype is None else DTYPES.get(dtype, dtype)
    sources: list[str | None] = [model] if compare is None else [model, compare]
    if model is None and num_heads is None:
        raise BadInput("profile: name a model, or describe attention: --num-heads, --head-dim …")
    found: list[Profile] = []
    with working("reading the model") as work:

        def say(done: int, total: int, line: str) -> None:
            work.update(done, total, line)
            if work.hidden:
                work.say(line)

        for source in sources:
            if source is None:
                assert num_heads is not None
                from headwise.profile import from_options

                shape, stored, runs = (
                    from_options(num_heads=num_heads, num_kv_heads=num_kv_heads,
                                 head_dim=head_dim, embed_dim=embed_dim, layers=layers,
                                 window=window),
                    "float32", False,
                )  # fmt: skip
            else:
                shape, stored, runs = _read(source, kind, work.say)
            machine = None
            if runs and measure:
                machine = _machine(kind or stored, device)
            name = kind or stored
            _known(name)
            found.append(
                run(
                    shape, lengths, source=source if runs and measure else None, batch=batch,
                    dtype=name, device=device, attention=attention, cache=cache,
                    machine=machine, beyond_trained=beyond_trained, say=say,
                )
            )  # fmt: skip
    console = terminal()
    for one in found:
        _print(console, one)
        if budget is not None:
            console.print(*one.memory_lines(budget), sep="\n", highlight=False)
        if wait is not None:
            console.print(one.latency_line(wait), highlight=False)
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


def _read(source: str, dtype: str | None, say: Any) -> tuple[Shape, str, bool]:
    """(shape, the stored dtype, whether its prefill can be measured)."""
    from headwise import models
    from headwise.profile import from_config

    loaded = models.load(source, dtype=dtype, say=say)
    config = getattr(loaded.model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise BadInput(
            f"profile: {source} has no Hugging Face config to read its attention from; describe it "
            "by --num-heads, --head-dim, --layers"
        )
    runs = loaded.kind in ("causal", "encoder")
    return from_config(config, loaded.name), str(loaded.dtype).removeprefix("torch."), runs


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
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for name in names:
            table.add_column(name, justify="right")
        for line in lines:
            table.add_row(*line)
        console.print(table)

    def length(context: int) -> str:
        return f"{context:,}" + ("*" if context in one.beyond else "")

    rows(
        "counted",
        ["context", "attention GFLOP", "rest GFLOP", "KV cache", "peak", "with whole maps"],
        [
            [length(c.context), f"{c.attention_flops / 1e9:,.4g}", f"{c.other_flops / 1e9:,.4g}",
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
                cells += [f"{1e3 * m.decode:.3g}", f"{limit[1]:.0%}"]
            lines.append(cells)
        names = ["context", "peak", "prefill s", "attention", "of matrix rate"]
        if any(m.decode is not None for m in one.measured):
            names += ["token ms", "of read rate"]
        rows("measured", names, lines)
    if one.beyond:
        console.print(f"* beyond the {shape.positions:,} positions that the model was made for")
    if one.stopped is not None:
        console.print(f"out of memory at {one.stopped:,} tokens", highlight=False)
    for line in one.growth_lines():
        console.print(line, highlight=False)
    if one.machine is not None:
        console.print(
            f"this machine ({one.machine.device}, {one.machine.threads} threads): matrix product "
            f"{one.machine.flops / 1e9:,.0f} GFLOP/s, read {one.machine.read / 1e9:,.1f} GB/s",
            highlight=False,
        )


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
