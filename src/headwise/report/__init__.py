"""The report: one self-contained HTML page, drawn from records alone.

It imports nothing of headwise but records and errors, so an old run can be drawn on any machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from headwise._extras import require
from headwise.record import Record, write_text
from headwise.report.collect import Run, collect
from headwise.report.embed import payload
from headwise.report.fragment import fragment

__all__ = ["build", "overview", "write_report"]

# One idea a file; each uses only names of those before it.
SCRIPTS = (
    "dom", "colour", "data", "statistics", "weights", "tokens", "axisview", "mapview",
    "overview", "pick", "head", "table", "similarity", "rollout", "checks", "cost", "study",
    "about", "app",
)  # fmt: skip


def build(records: Iterable[Record], *, title: str | None = None) -> str:
    """The report of one run as one HTML page that needs no network and stays under 5 MB.

    Args:
        records: the records of one `headwise report` run.
        title: the page's title; the model's name where it is left out.

    Raises:
        BadFile: a record is malformed, or the records do not make one run.
        MissingExtra: jinja2 is not installed.
    """
    jinja2 = require("jinja2", extra="report", purpose="headwise report")
    run = collect(records)
    data = payload(run)
    script, style = viewer(), _part("style.css")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(_part("template.html"))
    return page.render(
        title=title or _title(run),
        policy=_policy(script, style),
        style=_markup(style),
        script=_markup(script),
        data=_markup(_json(data)),
    )


def write_report(records: Iterable[Record], path: str | os.PathLike[str]) -> None:
    """Write the page of `build` to `path`. It appears whole or not at all.

    Raises:
        HeadwiseError: as `build`; or the path cannot be written.
    """
    write_text(path, [build(records)])


def overview(records: Iterable[Record]) -> str:
    """A fragment of HTML for notebooks: layers × heads as thumbnails. No script, no request.

    Raises:
        BadFile: a record is malformed, or the records do not make one run.
    """
    return fragment(collect(records))


def viewer() -> str:
    """The viewer: plain modern JavaScript in one function scope."""
    body = "\n".join(_part(f"js/{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{body}\n}})();\n'


def _part(name: str) -> str:
    text = files("headwise.report").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")  # the policy's hash is of what the browser sees


def _policy(script: str, style: str) -> str:
    def hashed(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _json(data: Any) -> str:
    """JSON that cannot end its script element, whatever its texts hold."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _markup(text: str) -> Any:
    return require("markupsafe", extra="report", purpose="headwise report").Markup(text)


def _title(run: Run) -> str:
    model = str(run.facts.get("model") or "a model")
    what = "a study of heads" if run.studies else "what attention costs"
    what = "attention checks" if run.checks else what
    return f"{model} · {'attention heads' if run.modules else what}"
