"""Writes reports as one self-contained page: ``Report`` objects enter, HTML leaves.

Plotly and the page's own script and style are inlined, and a content security policy lets the page load nothing and
run nothing else. Every name goes through Jinja2's autoescape; the plots' figures lie in a JSON block that cannot end
its element. Needs the ``html`` extra: jinja2 and plotly.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vllm_memprof.accounting.model import INFERRED, MODELLED, Report
from vllm_memprof.errors import MemprofError
from vllm_memprof.report.plots import Plots, View, plots
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.base import (
    MODELLED_MARK,
    MUTED,
    NOT_MEASURED,
    PLAIN,
    TOTAL,
    Column,
    Row,
    Section,
)
from vllm_memprof.report.sections.findings import FindingView, finding_views
from vllm_memprof.report.sections.head import head, verdict
from vllm_memprof.units import format_bytes, format_gib
from vllm_memprof.version import __version__

if TYPE_CHECKING:
    import jinja2

#: Tables scroll sideways: every column is wanted.
_WIDE = 200
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
#: What stands for a figure that is not known; it sorts last, up or down.
_UNKNOWN = ("-", "?", "", NOT_MEASURED)


@dataclass(frozen=True)
class _Picture:
    """What stands beside the plots of a view: a sentence and a table for each."""

    view: View
    timeline_text: str
    timeline: Section | None
    waterfall_text: str
    waterfall: Section | None


@dataclass(frozen=True)
class _Page:
    """One run on the page."""

    title: str
    status: str
    verdict: str
    head: list[tuple[str, str]]
    findings: list[FindingView]
    pictures: list[_Picture]
    folded: str
    ranks: int
    skew: Section | None
    skew_drawn: bool
    sections: list[Section]
    data: str  # JSON for the script


def render_html(*reports: Report) -> str:
    """The page.

    Args:
        reports: one, or several runs of one log, one below the other.

    Raises:
        MemprofError: jinja2 or plotly is not installed.
    """
    return render_page(
        "page",
        pages=[_page(report) for report in reports],
        modelled=any(report.run.simulated for report in reports),
    )


def render_page(name: str, **values: Any) -> str:
    """A page of the template and the script of that name, with the library, the style and the policy of all pages.

    Raises:
        MemprofError: jinja2 or plotly is not installed.
    """
    library = _plotly()
    script = _template("common.js") + _template(f"{name}.js")
    text = (
        _environment()
        .get_template(f"{name}.html.j2")
        .render(
            version=__version__,
            library=library,
            script=script,
            style=_template("page.css"),
            policy=_policy(library, script),
            mark=MODELLED_MARK,
            **values,
        )
    )
    return text.strip() + "\n"


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as exc:
        raise _missing("plotly") from exc
    text: str = get_plotlyjs()
    if "</script" in text.lower():
        raise MemprofError(
            "this release of plotly cannot be inlined: it holds </script",
            hint="pip install -U plotly",
        )
    return text.replace("\r\n", "\n").replace(
        "\r", "\n"
    )  # as the browser reads it, so that its hash holds


def _environment() -> jinja2.Environment:
    try:
        import jinja2
    except ImportError as exc:
        raise _missing("jinja2") from exc
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["order"] = sort_value
    environment.filters["slug"] = _slug
    return environment


def _missing(name: str) -> MemprofError:
    hint = "pip install 'vllm-memprof[html]', or another --format"
    return MemprofError(f"--format html needs {name}, which is not installed", hint=hint)


def _template(name: str) -> str:
    return files("vllm_memprof.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Nothing is loaded, and no script runs but these, by their hashes."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    )


def script_json(value: Any) -> str:
    """JSON that stays within its script element and is the same to an HTML parser.

    Raises:
        ValueError: a figure that JSON cannot hold (NaN).
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def sort_value(cell: str) -> str | None:
    """What a cell is sorted by: its number, that after an arrow where there are two; "" unknown; None a text."""
    text = cell.split("→")[-1].strip()
    if text in _UNKNOWN:
        return ""
    found = _NUMBER.match(text)
    if found is None or text[found.end() :].strip() not in ("", "x", "ms", "s", "±"):
        return None
    return found.group().replace(",", "").lstrip("+")


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _page(report: Report) -> _Page:
    drawn = plots(report)
    return _Page(
        title=report.run.model,
        status=report.run.status,
        verdict=verdict(report),
        head=[(name, text) for name, text in head(report) if name not in ("model", "verdict")],
        findings=finding_views(report),
        pictures=[_picture(view) for view in drawn.views],
        folded=drawn.folded,
        ranks=len(report.ranks),
        skew=_skew(drawn),
        skew_drawn=any(row.spread for row in drawn.skew),
        sections=sections(report, _WIDE),
        data=script_json(drawn.to_json()),
    )


def _picture(view: View) -> _Picture:
    return _Picture(
        view=view,
        timeline_text=view.no_timeline or _timeline_text(view),
        timeline=None if view.timeline is None else _timeline_table(view),
        waterfall_text=view.no_waterfall or _waterfall_text(view),
        waterfall=None if not view.waterfall else _waterfall_table(view),
    )


def _timeline_text(view: View) -> str:
    line = view.timeline
    assert line is not None
    seconds = line.moments[-1].seconds - line.moments[0].seconds
    text = f"{view.drawn}: {len(line.moments)} readings in {seconds:.1f} s"
    if line.worst_bytes is not None:
        text += f"; most in use {format_gib(line.worst_bytes)} of {format_gib(view.device_total_bytes)} GiB"
    if view.requested_bytes is not None:
        text += f"; requested {format_gib(view.requested_bytes)} GiB"
    for peak in line.peaks:
        text += f"; {peak.what} {peak.where} up to {format_gib(peak.bytes)} GiB"
    return text


def _timeline_table(view: View) -> Section:
    line = view.timeline
    assert line is not None
    columns = [
        Column("s"),
        Column("Phase", right=False),
        Column("Edge", right=False),
        Column("in use"),
    ]
    columns += [
        Column(f"{owner.name} {MODELLED_MARK}" if owner.how == MODELLED else owner.name)
        for owner in line.owners
    ]
    rows = []
    for i, moment in enumerate(line.moments):
        sizes = [line.in_use[i], *(owner.bytes[i] for owner in line.owners)]
        cells = [f"{moment.seconds:.3f}", moment.phase, moment.edge]
        rows.append(Row([*cells, *(format_gib(size, 4) for size in sizes)]))
    notes = ["GiB; -: not read at that moment, so that its bytes are in another column"]
    inferred = [owner.name for owner in line.owners if owner.how == INFERRED]
    notes += [f"inferred: {', '.join(inferred)}"] if inferred else []
    notes += [f"{line.left_out} more readings are in report.json"] if line.left_out else []
    return Section(f"Readings of {view.drawn}", columns, rows, notes)


def _waterfall_text(view: View) -> str:
    first, last = view.waterfall[0], view.waterfall[-1]
    ends = [f"{step.title}, {format_gib(step.bytes)} GiB" for step in (first, last)]
    return f"{view.labels}: from {ends[0]}, to {ends[1]}"


def _waterfall_table(view: View) -> Section:
    rows = [
        Row(
            [step.title, format_gib(step.bytes, 4), format_bytes(step.bytes)],
            style=TOTAL if step.kind == "level" else PLAIN,
        )
        for step in view.waterfall
    ]
    return Section(
        f"Steps of {view.labels}",
        [Column("Step", right=False), Column("GiB"), Column("bytes")],
        rows,
    )


def _skew(drawn: Plots) -> Section | None:
    """Least, most and spread of each figure; None for one rank."""
    if not drawn.skew:
        return None
    rows = []
    for row in drawn.skew:
        ends = [format_gib(row.least, 4), row.least_label, format_gib(row.most, 4), row.most_label]
        if not row.spread:
            ends[1] = ends[3] = "all" if None not in row.bytes else "all that have it"
        cells = [row.title, *ends, format_gib(row.median, 4), format_bytes(row.spread)]
        rows.append(Row(cells, style=PLAIN if row.spread else MUTED))
    columns = [
        Column("Figure", right=False),
        Column("least, GiB"),
        Column("on", right=False),
        Column("most, GiB"),
    ]
    columns += [Column("on", right=False), Column("median, GiB"), Column("spread, bytes")]
    return Section("Ranks beside each other", columns, rows)
