"""Draws documents as one self-contained page, with the plots of a report and of a sweep.

The page's script and style are inlined, and Plotly's basic bundle where something is plotted over
time or a sweep; a content security policy lets the page load nothing and run nothing else. Every
name goes through Jinja2's autoescape; the plots' figures lie in a JSON block that cannot end its
element.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from vllm_memprof.accounting.model import Report
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import (
    MUTED,
    NOT_MEASURED,
    PLAIN,
    TOTAL,
    Document,
    Section,
)
from vllm_memprof.record.spans import DERIVED, MODELLED
from vllm_memprof.report.documents import Found, document
from vllm_memprof.report.documents.first_screen import FirstScreen, Opening, opening_of
from vllm_memprof.report.language import ENGLISH, Language, language
from vllm_memprof.report.plots import Plots, RankView, SkewRow, plots
from vllm_memprof.report.sections.base import draw, sentences_of
from vllm_memprof.report.sections.starts import starts_section
from vllm_memprof.tables import GIB4, Column, Paper, modelled
from vllm_memprof.text import fill, join, plain, text
from vllm_memprof.units import GIB as GIB_BYTES
from vllm_memprof.units import largest, smallest
from vllm_memprof.version import __version__

if TYPE_CHECKING:
    import jinja2

#: Tables scroll sideways: every column is wanted.
_WIDE = 200
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
#: Words that the scripts say, by their English template.
_SAID = re.compile(r'\bsay\("((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class _Bar:
    """A bar beside a row of a table, in percent of the widest."""

    left: float
    width: float
    tone: str  # a colour of the style


@dataclass(frozen=True)
class _Page:
    """One document on the page."""

    document: Document
    slugs: list[str]  # of the sections, the same in every language
    opening: Opening | None = None  # of a report
    plots: Plots | None = None
    data: str = ""  # JSON for the script


def render_html(*found: Found, lang: str = ENGLISH) -> str:
    """Return the page.

    Args:
        found: one, or several runs of one log, one below the other.
        lang: one of ``language.LANGUAGES``.
    """
    say = language(lang)
    pages = [_page(each, say) for each in found]
    scripts = ["common.js"]
    scripts += ["report.js"] if any(page.plots for page in pages) else []
    scripts += ["sweep.js"] if any(page.document.curves for page in pages) else []
    script = "".join(map(_template, scripts))
    plotted = any(page.document.curves or (page.plots and page.plots.drawn) for page in pages)
    library = _template("../vendor/plotly-basic.min.js") if plotted else ""
    words = {english: say.catalogue.get(english, english) for english in _SAID.findall(script)}
    page = (
        _environment(say)
        .get_template("page.html.j2")
        .render(
            version=__version__,
            lang=say.name,
            library=library,
            script=script,
            style=_template("page.css"),
            policy=_policy(*(each for each in (library, script) if each)),
            words=script_json(words) if say.catalogue else "",
            starts=say(_starts(found)),
            pages=pages,
            modelled=any(page.document.simulated for page in pages),
        )
    )
    return page.strip() + "\n"


def _starts(found: Sequence[Found]) -> Section | None:
    """Return the table that compares several engine starts; None where there are not several."""
    reports = [each for each in found if isinstance(each, Report)]
    return starts_section(reports, _WIDE) if len(reports) > 1 else None


def _environment(say: Language) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    unknown = say(NOT_MEASURED)
    environment.filters["order"] = lambda cell: "" if cell == unknown else sort_value(cell)
    environment.globals["say"] = lambda template, **params: fill(
        say.catalogue.get(template, template), params
    )
    environment.filters |= {
        told.__name__: lambda of, told=told: say(told(of))
        for told in (
            timeline_text,
            timeline_table,
            serving_text,
            waterfall_text,
            waterfall_table,
            skew_table,
            bars,
        )
    }
    return environment


def _template(name: str) -> str:
    return files("vllm_memprof.report").joinpath(f"templates/{name}").read_text("utf-8")


def _policy(*scripts: str) -> str:
    """Return a policy by which nothing is loaded and no script runs but these, by their hashes."""
    hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    )


def script_json(value: object) -> str:
    """Return JSON that stays within its script element and is the same to an HTML parser.

    Raises:
        ValueError: a figure that JSON cannot hold (NaN).
    """
    written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        written = written.replace(char, f"\\u{ord(char):04x}")
    return written


def sort_value(cell: str) -> str | None:
    """Return what a cell is sorted by: its (last) number; "" where unknown, None for a text."""
    shown = cell.split("→")[-1].strip()
    if shown in ("-", "?", "", NOT_MEASURED):
        return ""
    found = _NUMBER.match(shown)
    if found is None or shown[found.end() :].strip() not in ("", "x", "ms", "s", "±"):
        return None
    return found.group().replace(",", "").lstrip("+")


def _page(found: Found, say: Language) -> _Page:
    page = document(found, _WIDE)
    slugs = [
        re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") for section in page.sections
    ]
    if isinstance(found, Report):
        drawn, opening = plots(found), opening_of(FirstScreen([found]), _WIDE)
        return _Page(say(page), slugs, say(opening), drawn, script_json(say(drawn).to_json()))
    curves = page.curves and script_json({"gib": GIB_BYTES, **asdict(say(page.curves))})
    return _Page(say(page), slugs, data=curves or "")


def serving_text(view: RankView) -> str:
    """Return what the plot of serving shows, in words; "" where the run was not sampled."""
    served = view.serving
    if served is None:
        return ""
    curves = []
    for curve in served.curves:
        low = smallest(curve.low)
        high = largest(curve.high)
        curves.append(text("{title} {low:gib} to {high:gib} GiB", curve, low=low, high=high))
    figures = {
        **vars(served),
        "drawn": view.drawn,
        "seconds": served.seconds[-1] - served.seconds[0],
        "requests": len(served.bars) + served.left_out,
        "curves": join("; ", curves),
        "left_out": served.left_out or None,
    }
    return sentences_of("serving", figures)


def timeline_text(view: RankView) -> str:
    """Return what the timeline shows, in words, or why there is none."""
    line = view.timeline
    if line is None:
        return view.no_timeline or ""
    figures = {
        **vars(view),
        **vars(line),
        "moments": len(line.moments),
        "seconds": line.moments[-1].seconds - line.moments[0].seconds,
    }
    peaks = [sentences_of("peak", vars(peak) | {peak.what: True}) for peak in line.peaks]
    return join("; ", [sentences_of("timeline", figures), *peaks])


def timeline_table(view: RankView) -> Section | None:
    """Return the timeline as a table."""
    line = view.timeline
    if line is None:
        return None
    columns = [
        Column(modelled(owner.title, owner.how == MODELLED), owner.bytes.__getitem__, GIB4)
        for owner in line.owners
    ]
    derived = join(", ", [owner.title for owner in line.owners if owner.how == DERIVED])
    return draw(
        Paper(),
        "timeline",
        range(len(line.moments)),
        {"drawn": view.drawn, "derived": derived, "left_out": line.left_out or None},
        columns=columns,
        seconds=lambda at: f"{line.moments[at].seconds:.3f}",
        phase=lambda at: line.moments[at].phase,
        edge=lambda at: TITLES["edges"][line.moments[at].edge],
        in_use=line.in_use.__getitem__,
    )


def waterfall_text(view: RankView) -> str:
    """Return the ends of the waterfall, in words, or why there is none."""
    if not view.waterfall:
        return view.no_waterfall or ""
    first, last = view.waterfall[0], view.waterfall[-1]
    return text(
        "{labels}: from {first}, {first_size:gib} GiB, to {last}, {last_size:gib} GiB",
        view,
        first=first.title,
        first_size=first.bytes,
        last=last.title,
        last_size=last.bytes,
    )


def waterfall_table(view: RankView) -> Section:
    """Return the waterfall as a table, beside which ``bars`` stand."""
    look = {"level": TOTAL, "change": PLAIN}
    figures = {"labels": view.labels}
    return draw(Paper(), "waterfall", view.waterfall, figures, look=lambda step: look[step.kind])


def bars(view: RankView) -> list[_Bar]:
    """Return a bar from 0 to each level, and from level to level for each change."""
    widest = max((step.bytes for step in view.waterfall), default=0) or 1
    found, height = [], 0
    for step in view.waterfall:
        level = step.kind == "level"
        start, height = (0, step.bytes) if level else (height, height + step.bytes)
        low, high = (100 * max(each, 0) / widest for each in sorted((start, height)))
        tone = ("kv" if "KV" in step.title else "cached") if level else "context"
        found.append(_Bar(round(low, 2), round(high - low, 2), tone))
    return found


def skew_table(drawn: Plots) -> Section | None:
    """Return the least, most and median of each figure; None for one rank."""

    def on(row: SkewRow, label: str) -> str:
        if row.spread:
            return label
        return text("all that have it") if None in row.bytes else text("all")

    muted = {True: PLAIN, False: MUTED}
    found = draw(
        Paper(),
        "skew_of_figures",
        drawn.skew,
        look=lambda row: muted[bool(row.spread)],
        least_on=lambda row: on(row, row.least_label),
        most_on=lambda row: on(row, row.most_label),
    )
    return found if drawn.skew else None
