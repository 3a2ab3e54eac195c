"""What a person reads in the terminal: drawn from records, as the page is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.record import Record

if TYPE_CHECKING:
    from rich.console import Console

# Links listed besides those asked for.
LINKS_LISTED = 8
CAUTION = "Attention maps are clues to look further, not explanations of what a model does."


def print_summary(console: Console, records: Sequence[Record]) -> None:
    """The model, what was caught, heads by name, and the strongest links."""
    from rich.table import Table
    from rich.text import Text

    run = next(record for record in records if record.kind == "run").values
    # Records may come from anywhere: no text of theirs may steer the terminal.
    caught = [record for record in records if record.kind == "attention"]
    for kind, words in (("cost", "the cost of {} context lengths"), ("study", "{} designs")):
        count = sum(record.kind == kind for record in records)
        if count and not caught:
            name = _printable(run.get("model") or "a model")
            console.print(Text.assemble((name, "bold"), "  ", words.format(count)))
            return
    shape = f"{len(caught)} attention modules, {sum(r.values['heads'] for r in caught)} heads"
    lengths = sorted({r.values["queries"] for r in caught})
    console.print(
        Text.assemble(
            (_printable(run.get("model") or "a model"), "bold"),
            f"  {shape}, {' and '.join(f'{n:,}' for n in lengths)} positions, "
            f"{_printable(run.get('dtype', ''))} on {_printable(run.get('device', ''))}, "
            f"{float(run.get('seconds') or 0):.1f} s",
        )
    )
    if run.get("note"):
        console.print(Text(_printable(run["note"])))
    for line in run.get("not_caught", []):
        console.print(Text(f"not caught: {_printable(line)}", style="yellow"))

    labels = Counter(
        label for r in records if r.kind == "head" for label in r.values.get("labels", [])
    )
    heads = sum(record.kind == "head" for record in records)
    if labels:
        words = ", ".join(f"{count} {_printable(name)}" for name, count in labels.most_common())
        console.print(Text(f"of {heads} heads: {words}"))

    where = {record.where["id"]: record.values for record in caught}
    asked = [r for r in records if r.kind == "link" and r.values.get("asked")]
    for pair in dict.fromkeys((r.values["query_token"], r.values["key_token"]) for r in asked):
        mine = [r for r in asked if (r.values["query_token"], r.values["key_token"]) == pair]
        best = mine[0]
        console.print(
            Text.assemble(
                f"{_shown(pair[0])} reads {_shown(pair[1])} most in ",
                (_head_name(best, where), "bold"),
                f", weight {best.values['weight']:.3f}",
            )
        )
        rest = ", ".join(f"{_head_name(r, where)} {r.values['weight']:.3f}" for r in mine[1:])
        if rest:
            console.print(Text(f"  then {rest}"))

    links = [r for r in records if r.kind == "link" and not r.values.get("asked")][:LINKS_LISTED]
    if links:
        table = Table(title="strongest links", title_justify="left", box=None, pad_edge=False)
        for name in ("query", "reads key", "head", "weight"):
            table.add_column(name, justify="right" if name == "weight" else "left", no_wrap=True)
        for record in links:
            values = record.values
            table.add_row(
                Text(f"{values['query']} {_shown(values['query_token'])}"),
                Text(f"{values['key']} {_shown(values['key_token'])}"),
                Text(_head_name(record, where)),
                f"{values['weight']:.3f}",
            )
        console.print(table)
        console.print(
            "  one a query token, one a head and key; special and first tokens, the token itself",
            "and the one before it are left out",
            style="dim",
        )
    console.print(Text(CAUTION, style="italic"))


SIGNS = {"passed": "passed", "failed": "FAILED", "not run": "not run"}
STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


def print_checks(console: Console, records: Sequence[Record]) -> None:
    """A line a check: passed, FAILED (where, by how much, the likely cause, its fix), not run."""
    from rich.table import Table
    from rich.text import Text

    checks = [record for record in records if record.kind == "check"]
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("result", "check", "what was found"):
        table.add_column(name, no_wrap=name == "result", overflow="fold")
    for record in checks:
        values = record.values
        named = [record.where["check"], record.where.get("path"), record.where.get("case")]
        lines = [str(values["message"])]
        place = values.get("where")
        if place:
            lines.append("first seen in " + _culprit(place))
        if values.get("cause"):
            lines.append(f"likely cause: {values['cause']}")
        if values.get("fix"):
            lines.append(f"usual fix: {values['fix']}")
        status = values["status"]
        found = Text("\n".join(lines))
        if values.get("ran"):
            found.append(f"\nran: {values['ran']}", style="dim")
        table.add_row(
            Text(SIGNS[status], style=STYLES[status]),
            Text(", ".join(str(word) for word in named if word)),
            found,
        )
    console.print(table)
    counts = Counter(record.values["status"] for record in checks)
    seconds = sum(record.values.get("seconds") or 0.0 for record in checks)
    words = ", ".join(f"{counts[name]} {SIGNS[name]}" for name in SIGNS if counts[name])
    console.print(Text(f"{words}, {seconds:.1f} s"), highlight=False)


def _culprit(place: dict) -> str:
    parts = [str(place["module"])] if place.get("module") else []
    for name in ("layer", "head", "query", "key"):
        if place.get(name) is not None:
            parts.append(f"{name} {place[name]}")
    if isinstance(place.get("weight"), float):
        parts.append(f"weight {place['weight']:.3g}")
    return ", ".join(parts)


def _head_name(record: Record, where: dict) -> str:
    """ "layer 9 head 4", with the stack and kind where a model has several."""
    values = where.get(record.where["id"], {})
    words = f"layer {values.get('layer', '?')} head {record.where['head']}"
    stack, kind = values.get("stack") or "", values.get("attention", "self")
    extra = " ".join(word for word in (stack, "cross" if kind == "cross" else "") if word)
    return _printable(f"{extra} {words}" if extra else words)


def _shown(token: object) -> str:
    """A token in quotes, its control characters made visible and its length bounded."""
    text = _printable(token)
    return f"“{text if len(text) <= 24 else text[:23] + '…'}”"


def _printable(value: object) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
