"""Tables and texts of a terminal whose lines end between words, and behind any ideograph."""

from __future__ import annotations

import re
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.containers import Lines
from rich.measure import Measurement, measure_renderables
from rich.table import Table
from rich.text import Text

#: Wider than any table.
_ENDLESS = 10_000
#: What stays on a line that has room for it: a word, or an ideograph, with the marks around it.
_PIECE = re.compile(r"[（“]*(?:[^\s\u2e80-\uffef]+|[^\s（“])[，。；：、）”]* *|\s|.")


class Prose(Text):
    """A paragraph that is folded between words and ideographs."""

    def wrap(self, console: Console, width: int, **how: Any) -> Lines:
        """Return the lines of the text."""
        cuts, room = [], width
        for piece in _PIECE.finditer(self.plain):
            if room < cell_len(piece[0].rstrip()) <= width:
                cuts.append(piece.start())
                room = width
            room = width if piece[0] == "\n" else (room - cell_len(piece[0])) % (width + 1)
        return Text("\n").join(self.divide(cuts)).wrap(console, width, **how)

    def __rich_measure__(self, *on: Any) -> Measurement:
        """Return the width of the longest word, and that of the longest line."""
        pieces = map(str.rstrip, _PIECE.findall(self.plain))
        return super().__rich_measure__(*on)._replace(minimum=max(map(cell_len, pieces), default=0))


class Grid(Table):
    """A table whose columns are as wide as their longest words, where the width allows it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table; the widest columns lose most, those of figures last."""
        columns, endless = self.columns, options.update_width(_ENDLESS)
        sizes = [
            measure_renderables(console, endless, [each.header, *each.cells]) for each in columns
        ]
        widths = [size.maximum for size in sizes]

        for _ in range(options.max_width, console.measure(self, options=endless).maximum):
            loose = [width > size.minimum for width, size in zip(widths, sizes, strict=True)]
            ragged = [any(loose) or each.justify == "left" for each in columns]
            _, _, width, at = max(zip(loose, ragged, widths, range(len(widths)), strict=True))
            columns[at].width = widths[at] = width - 1
        yield from super().__rich_console__(console, options)
