"""Writes a comparison of two runs as a table and as GitHub markdown: a ``Diff`` enters, text leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from vllm_memprof.compare.diff import Diff
from vllm_memprof.record.codec import to_json
from vllm_memprof.report.markdown import escape, section_lines
from vllm_memprof.report.sections.diff import diff_sections, head, verdict
from vllm_memprof.report.table import Painter

_WIDE = 200


def render_diff_json(diff: Diff) -> str:
    """``memprof.diff/1`` as text."""
    return json.dumps(to_json(diff), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def render_diff_markdown(diff: Diff) -> str:
    """The whole comparison, for a file, an issue or a pull request."""
    lines = [f"# memprof diff: {escape(verdict(diff))}", ""]
    lines += [f"- **{escape(name)}**: {escape(value)}" for name, value in head(diff)]
    for section in diff_sections(diff, _WIDE):
        lines += ["", *section_lines(section)]
    return "\n".join(lines) + "\n"


def render_diff_table(diff: Diff, console_width: int | None = None) -> RenderableType:
    """The whole comparison as one rich renderable.

    Args:
        diff: the two runs.
        console_width: characters per line; None takes the console's at the time of printing.
    """
    return _Tables(diff, console_width)


class _Tables:
    """Lays the sections out once the console's width and encoding are known."""

    def __init__(self, diff: Diff, width: int | None) -> None:
        self._diff = diff
        self._width = width

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        draw = Painter(ascii_only=options.ascii_only)
        yield draw.head(head(self._diff))
        for section in diff_sections(self._diff, self._width or options.max_width):
            yield Text()
            yield draw.section(section)
        yield Text()
        yield draw.text(verdict(self._diff), "bold")
