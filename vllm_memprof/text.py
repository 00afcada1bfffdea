"""Sentences that can be said in another language: a str that remembers its template and parameters.

The template is the id of a message, as in gettext. ``text("{size:gib} GiB are free", size=n)`` is
the English sentence, and a catalogue translates it by its template, never by its words. What is not
a ``Text`` is somebody's own word, a name or a figure, and stays as it is in every language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from string import Formatter, digits
from typing import Any

from vllm_memprof.units import (
    format_bytes,
    format_gib,
    format_ms,
    format_rate,
    format_signed_gib,
    format_size,
)

#: A template, said where its figures are known, or ``say`` where that of ``when`` is known, too.
Sentence = str | Mapping[str, str]
Part = Sentence | tuple[Sentence, ...]
#: Format specs for quantities; each takes an integer of bytes, a count, or None where it is
#: unknown.
QUANTITIES: dict[str, Callable[[int | float | None], str]] = {
    "gib": format_gib,
    "+gib": lambda size: format_signed_gib(size, 2),
    "gib3": lambda size: format_gib(size, 3),
    "gib4": lambda size: format_gib(size, 4),
    "size": format_size,
    "mib": partial(format_rate, digits=1),
    "bytes": lambda size: format_bytes(None if size is None else int(size)),
    "ms": format_ms,
}


#: What a terminal obeys: sequences whole (a digit ends one only where a set of characters is
#: chosen; elsewhere it is that of a figure), then control characters of ASCII and C1, separators of
#: lines, and what turns the direction of writing.
_CONTROL = re.compile(
    "\x1b[\\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\\\|\x9c)?|[\x90\x9d-\x9f][^\x07\x1b\x9c\n]*[\x07\x9c]"
    "|(?:\x1b\\[|\x9b)[0-9;:?<=>]*[ -/]*[@-~]|\x1b(?:[0-~]|[ -/]+[@-~]|[#%(-+][0-9])"
    "|[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]"
)
#: What a spreadsheet takes for a formula.
_FORMULA = re.compile(r"\s*[=+\-@]")


def plain(words: str) -> str:
    """Return a text of others without what a terminal would obey; tabs and line feeds stay."""
    return _CONTROL.sub("", words) if _CONTROL.search(words) else words


def plain_data(data: Any) -> Any:
    """Return what JSON holds, each text in it made ``plain``."""
    if isinstance(data, dict):
        return {plain(str(name)): plain_data(value) for name, value in data.items()}
    if isinstance(data, list):
        return [plain_data(value) for value in data]
    return plain(data) if isinstance(data, str) else data


def csv_cell(value: Any) -> Any:
    """Return the value of a cell; a text that a spreadsheet would compute begins with ``'``."""
    if not isinstance(value, str):
        return value
    try:
        float(value)
    except ValueError:
        value = plain(value)
        return f"'{value}" if _FORMULA.match(value) else value
    return value


class Text(str):
    """A sentence or a word of memprof's own, in English, with what it was made of."""

    template: str
    params: Mapping[str, object]


class _Param:
    """A parameter while a template is filled: formats quantities by their spec."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __format__(self, spec: str) -> str:
        quantity = QUANTITIES.get(spec)
        if quantity is None:
            return plain(format(self._value, spec))
        if self._value is not None and not isinstance(self._value, (int, float)):
            raise ValueError(f"{spec!r} takes a number, not {self._value!r}")
        return quantity(self._value)


def text(template: str, of: object = None, /, **params: object) -> Text:
    """Return the sentence of a template.

    Args:
        template: English, with ``{name}`` or ``{name:spec}`` for parameters. Specs are those of
            ``format``, and ``gib``, ``+gib``, ``gib3``, ``gib4``, ``size``, ``mib`` and ``bytes``
            for bytes, ``ms`` for seconds.
        of: what has the parameters that are not given, as attributes.
        params: figures, names, or further texts, which are translated in their turn.
    """
    if of is not None:
        names = {name for _, name, _, _ in Formatter().parse(template) if name}
        params |= {name: getattr(of, name) for name in names - params.keys()}
    filled = Text(fill(template, params))
    filled.template = template
    filled.params = params
    return filled


def titled(words: str) -> Text:
    """Return the words of a table as a ``Text``; those that are one already as they are."""
    return words if isinstance(words, Text) else text(words)


def join(mark: str, parts: Iterable[str | bool | None]) -> Text:
    """Return texts one after the other, ``mark``, itself translated, between them.

    What is no text, as of ``condition and text(...)``, is left out.
    """
    listed = tuple(part for part in parts if isinstance(part, str))
    joined = Text(mark.join(listed))
    joined.template = mark
    joined.params = {"parts": listed}
    return joined


def sentences(parts: Iterable[Part], figures: Mapping[str, object], mark: str = "; ") -> Text:
    """Return what ``said`` returns, one after the other, ``mark`` between them as of ``join``."""
    found = said(parts, figures)
    return found[0] if len(found) == 1 else join(mark, found)


def said(parts: Iterable[Part], figures: Mapping[str, object]) -> list[Text]:
    """Return those of some sentences that can be said.

    Args:
        parts: sentences. Of a tuple of alternatives the first that can be said counts.
        figures: by name; what takes one that is None, False or empty cannot be said.
    """
    found = []
    for part in parts:
        for one in part if isinstance(part, tuple) else (part,):
            template, also = (one, []) if isinstance(one, str) else (one["say"], [one["when"]])
            names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
            if all(_is_known(figures.get(name)) for name in names.union(also)):
                found.append(text(template, **{name: figures[name] for name in names}))
                break
    return found


def _is_known(figure: object) -> bool:
    return figure is not False and (figure == 0 or bool(figure))


def fill(template: str, params: Mapping[str, object]) -> str:
    """Return a template, in any language, with its parameters in their places."""
    if not params:
        return template.replace("{{", "{").replace("}}", "}")
    return template.format(**{name: _Param(value) for name, value in params.items()})


def translate(value: str, catalogue: Mapping[str, str]) -> str:
    """Return a text in the language of a catalogue, English template -> translated template.

    Parameters that are texts are translated first. A template that the catalogue lacks, and any
    str that is not a ``Text``, stays as it is.
    """
    if not isinstance(value, Text):
        return value
    parts = value.params.get("parts")
    if isinstance(parts, tuple):  # of ``join``
        mark = catalogue.get(value.template, value.template)
        return mark.join(translate(part, catalogue) for part in parts)
    params = {
        name: translate(param, catalogue) if isinstance(param, str) else param
        for name, param in value.params.items()
    }
    return fill(catalogue.get(value.template, value.template), params)


def fold(labels: Sequence[str]) -> str:
    """Return ``TP0, TP1, TP2, TP5`` as ``TP0-TP2, TP5``."""

    def run(entry: tuple[int, str]) -> Hashable:
        """Return what labels that follow each other have in common."""
        place, label = entry
        prefix = label.rstrip(digits)
        own = label.removeprefix(prefix)
        return (prefix, int(own) - place) if own else place

    runs = [[label for _, label in members] for _, members in groupby(enumerate(labels), run)]
    return ", ".join(
        own[0] if len(own) == 1 else f"{own[0]}-{own[-1].split(' ')[-1]}" for own in runs
    )


def spans(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: ``0, 2-5`` for 0, 2, 3, 4, 5."""
    return fold([str(number) for number in sorted(numbers)])
