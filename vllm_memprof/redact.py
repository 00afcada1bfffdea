"""Takes secrets out of text, command lines, environments and JSON, by their names and by their
forms.

The one place of memprof that does. It is pure and needs the standard library alone: engine
processes use it too. ``Redactor`` reads a text line by line, ``redact_text`` a whole one,
``redact_command`` an argument vector, ``redact_data`` what JSON holds. Patterns are ASCII, so that
bytes may be read as latin-1 (``launch.engine_log``).

A secret without a known name or form (an AWS or Huawei secret key that stands alone) cannot be told
from other text and stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

REDACTED = "***"

#: A name is secret when it ends with one of these, whatever joins the words.
_SECRET_ENDING = re.compile(
    r"(?:(?:api|access)keys?|accesskeyid|secretid"
    r"|(?:account|app|auth|encryption|license|master|private|secret|shared|signing|ssh"
    r"|subscription)key"
    r"|token|(?:api|access|auth|hf)tokens|secrets?|passwords?|passwd|passphrase|credentials?"
    r"|authorization|cookie)$"
)
#: Last words of names of Huawei Cloud (HUAWEICLOUD_SDK_AK, obs_sk).
_SHORT_WORDS = ("ak", "sk")
#: Ends of names whose numbers are counts: ``token: 12``, ``sk=128``.
_COUNTED = ("token", "tokens", *_SHORT_WORDS)
#: A name that ends with one of these words and ``token`` names a token of text.
_TEXT_TOKEN = re.compile(
    "added|assistant|audio|begin|bos|bot|cls|document|draft|each|end|eod|eom|eos|eot|every|extra"
    "|first|frame|generated|image|img|input|invalid|last|mask|max|min|new|next|num|output|pad|per"
    "|placeholder|prefix|prompt|reasoning|sampled|sep|separator|special|start|stop|suffix|think"
    "|tool|unexpected|unk|user|video|vision"
)
_HARMLESS = ("eostoken", "bostoken", "padtoken", "perstoken", "pertoken", "keepsecrets")

#: Variables that bear on device memory. Everything else stays out of the record.
_MEMORY_ENV = re.compile(
    "PYTORCH_(NPU_|CUDA_)?ALLOC_CONF|PYTORCH_NO_(NPU|CUDA)_MEMORY_CACHING"
    "|MULTI_STREAM_MEMORY_REUSE|TASK_QUEUE_ENABLE|P2P_HCCL_BUFFSIZE|LD_PRELOAD|OMP_NUM_THREADS"
    "|(CUDA|NVIDIA)_VISIBLE_DEVICES|(HCCL|NCCL|ASCEND|ACL|ATB|VLLM|MEMPROF)_.*"
)

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def is_secret(name: str) -> bool:
    """Return True where an option, variable or JSON key of this name has a secret value.

    Singular ``token`` counts (``--hf-token``), the plural does not (``--max-num-batched-tokens``),
    nor does a token of text (``bos_token``).
    """
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    words = [word.lower() for word in _WORDS.findall(name[-128:])]
    if words and words[-1] in _SHORT_WORDS:
        return True
    if not _SECRET_ENDING.search(squeezed) or squeezed.endswith(_HARMLESS):
        return False
    return not (words[-1:] == ["token"] and words[-2:-1] and _TEXT_TOKEN.fullmatch(words[-2]))


def redact_command(command: Sequence[str]) -> list[str]:
    """Return the command with its secrets replaced.

    The forms ``--name value``, ``--name=value``, ``NAME=value`` and JSON are covered, and every
    form of a secret. A secret option may take several values (vLLM's ``--api-key``): all up to the
    next option are replaced.
    """
    redacted: list[str] = []
    in_secret = False
    for token in command:
        name, equals, value = token.partition("=")
        named = bool(equals) and " " not in name and is_secret(name)
        if token.startswith("-"):
            in_secret = not equals and is_secret(name)
        if named and not _REFERENCE.fullmatch(value):
            redacted.append(f"{name}={REDACTED}")
        elif token.startswith("-") and equals:
            redacted.append(f"{name}={_redact_value(value)}")
        elif token.startswith("-") or not in_secret:
            redacted.append(_redact_value(token))
        else:
            redacted.append(REDACTED)
    return redacted


def select_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bear on device memory, sorted, secrets replaced."""
    chosen = sorted(filter(_MEMORY_ENV.fullmatch, env))
    return {name: redact_value(name, env[name]) for name in chosen}


def memory_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the same variables as they are, for another process; secret ones are left out."""
    return {
        name: value
        for name, value in env.items()
        if _MEMORY_ENV.fullmatch(name) and not is_secret(name)
    }


def redact_value(name: str, value: str) -> str:
    """Return the value of an option or variable, replaced where its name or form is secret."""
    return REDACTED if is_secret(name) else _redact_value(value)


def _redact_value(value: str) -> str:
    if value.lstrip().startswith(("{", "[")):
        try:
            data = json.loads(value)
            cleaned = redact_data(data)
        except (ValueError, RecursionError):
            return redact_text(value)
        return value if cleaned == data else json.dumps(cleaned)
    return redact_text(value)


def redact_data(data: Any, name: str = "") -> Any:
    """Return JSON data with its secrets replaced: by key, by form, and in lists of arguments.

    Args:
        data: dictionaries, lists and plain values; others are returned as they are.
        name: the key that the data stands under.
    """
    if isinstance(data, dict):
        named = data.get("name")  # {"name": "HF_TOKEN", "value": ...}
        return {
            key: redact_data(
                value, named if key == "value" and isinstance(named, str) else str(key)
            )
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        if name and is_secret(name):
            return [redact_data(item, name) for item in data]
        if data and all(isinstance(item, str) for item in data):
            return redact_command(data)
        return [redact_data(item) for item in data]
    if isinstance(data, bool) or data is None:
        return data
    if name and is_secret(name):
        keep = (isinstance(data, (int, float)) and name.lower().endswith(_COUNTED)) or data == ""
        return data if keep else REDACTED
    return _redact_value(data) if isinstance(data, str) else data


# --- text

#: In lower case, what every secret contains: an end of a name that ``is_secret`` accepts, or the
#: beginning of a form. Each word costs 1.3 s per GiB, and each pattern about as much: it begins
#: with a rare letter, for which a text is searched fast.
_NEEDLE_WORDS = ("@", "secret", "credent", "passphr", "bearer", "glpat-", "nvapi-")
_NEEDLES = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"k(?:ey|ie(?<=cookie)|ia(?<=akia)|(?<=[^a-z][as]k)[-=:'\" ]|en(?<=token)(?:(?![a-z])"
        r"|s(?:(?<=hf.tokens)|(?<=(?:api|uth|ess).tokens))))",
        r"w(?<=passw)",
        r"z(?:(?<=uthoriz)|a(?<=aiza))",
        r"j(?<=eyj)",
        r"x(?=ox)",
        r"_(?:(?<=hf_)|(?<=gh._)|(?<=pat_))",
    )
)
_ASIA = "ASIA"

#: The end of a name, from which the name is read to the left.
_NAME_END = re.compile(
    r"(?:key(?:s|[_.-]?id)?|secrets?|secret[_.-]?id|tokens?|passwords?|passwd|passphrase"
    r"|credentials?|authorization|cookie|(?<![a-z])[as]k)(?![a-z0-9]|[_.-]+[a-z0-9])",
    re.IGNORECASE | re.ASCII,
)
_NAME = re.compile(r"[A-Za-z0-9_.-]", re.ASCII)
_MOST_NAME = 128
#: What may follow a name and precede its value: ``'name': value``, ``name = value``,
#: ``environ['NAME'] = value``, ``"name": "X", "value": "..."``.
_SEPARATOR = re.compile(
    r"""(?:\\*["'])?\]?\s*(?:=>|:=|(?<!=)=(?!=)|:(?!:|//))\s*"""
    r"""|\\*["']\s*,\s*\\*["']?value\\*["']?\s*[:=]\s*""",
    re.ASCII | re.IGNORECASE,
)
#: ``'--api-key', 'value'`` of an argument vector.
_NEXT_ARGUMENT = re.compile(r"""\\*["']\s*,\s*(?=\\*["'])""", re.ASCII)
_HEADER = re.compile(r"(?:Bearer|Basic|Token|Digest|ApiKey)\s+", re.IGNORECASE | re.ASCII)
_QUOTE = re.compile(r"""(?:[bBrRfFuU]{1,2})?(\\*["'`])""", re.ASCII)
#: The beginning of a value that has an end of its own, or is none.
_ENCLOSED = re.compile(r"""(?:[bBrRfFuU]{1,2})?\\*["'`]|[(\[{<,;)}\]]""", re.ASCII)
_CALL = re.compile(r"[A-Za-z_][\w.]{0,40}\(", re.ASCII)
_PLAIN = re.compile(r"""[^\s,;)}\]&|"'<>`\\]+""", re.ASCII)
_SHELL = re.compile(r"""(?:[^\s"'`;|&<>\\]|\\\S)+""", re.ASCII)
_STOPS_OPTION = re.compile(r"""\s*(?:$|[-|&;<>#)\]}"'`,]|\\\s*$)""", re.ASCII)
#: Values that hold no secret: none at all, a reference to a variable, a secret that was replaced.
_REFERENCE = re.compile(
    r"(?:None|null|nil|True|False|true|false|\$\{?\w+\}?|\$\([^)]*\)|%\w+%|\**|\.\.\.)", re.ASCII
)
_NUMBER = re.compile(r"[-+]?[\d.,]+(?:e[-+]?\d+)?%?", re.ASCII | re.IGNORECASE)
#: Characters before a name that are looked at.
_MOST_BEFORE = 32
_OPENING = re.compile(r"\\*[\"']$")
_ENV_WORD = re.compile(r"\b(?:ENV|setenv)\s$", re.ASCII)
_ONLY_QUOTES = re.compile(r"[\"', ]*$")
_GAP = re.compile(r"\s+", re.ASCII)
_NO_VALUE = re.compile(r"(?:[|>]-?)?[ \t\\]*$")
_ANY_QUOTE = re.compile(r"[\"'`]")
_MARGIN = re.compile(r"[ \t>|-]*")
_ASSIGNED = re.compile(r"\s*(?<![=!<>])=(?!=)\s*", re.ASCII)
_ARGUMENT = re.compile(r"\s*,?\s*(\\*[\"'])(?!-)", re.ASCII)
_CONTINUED = re.compile(r"\s*\\\s*$", re.ASCII)
_OPEN, _CLOSE = "([{", ")]}"
_BEFORE_OPTION = " \t\"'`([{,=|;&>/"

_FORM = re.compile(
    r"(?P<url>://)(?!git@)[^\s/?#'\"<>]{1,256}@"
    r"|(?P<bearer>\b(?i:bearer)\s+)(?!(?i:tokens?|auth\w*|scheme|format)\b)[\w.~+/=-]{6,}"
    r"|(?<![A-Za-z0-9])(?:"
    r"hf_(?=[A-Za-z]*\d|[a-z]*[A-Z])[A-Za-z0-9]{8,}"
    r"|sk-(?=[\w-]{16}|[a-z_-]*[A-Z0-9])[\w-]{8,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeposr]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{6,}\.[\w-]{4,}(?:\.[\w-]*)*"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"
    r"(?:[\s:,;'\"]{1,8}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?)",
    re.ASCII,
)
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----")
_PEM_END = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY-----")

#: The beginning of a log record: it never continues the line before it.
_RECORD = re.compile(
    r"^.{0,70}?(?:\(\w[^()]{0,60}\bpid=\d"
    r"|\b(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b[:\s\]])"
    r"|^\W{0,3}(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|Traceback )",
    re.ASCII,
)
#: ``- name: HF_TOKEN``, with ``value: ...`` on the next line.
_NAMED = re.compile(r"""\bname["']?\s*[:=]\s*["']?$""", re.ASCII)
_NAMED_VALUE = re.compile(r"""\W{0,20}value["']?\s*[:=]\s*""", re.ASCII)
#: The rest of a value that a terminal has wrapped.
_WRAPPED = re.compile(r"[A-Za-z0-9_+/=.~-]+(?=$|[\s\"'`,;)}\]\\&|])", re.ASCII)
_ITEM = re.compile(r"""\s*(?:- +)?(?P<item>"[^"]*"|'[^']*'|[^\s,"'\])}]+)\s*,?\s*""", re.ASCII)
#: Lines shorter than this were not wrapped by a terminal.
_LEAST_WRAPPED = 36
#: Lines over which a value may go on: one of its own, a list, a private key.
_VALUE_LINES, _LIST_LINES, _KEY_LINES = 2, 40, 200


def may_hold_secret(text: str) -> bool:
    """Return False for a text in which there is nothing to redact; it costs far less than a look
    for secrets."""
    lower = f"\n{text.lower()}"  # a name may begin the text
    return (
        any(word in lower for word in _NEEDLE_WORDS)
        or _ASIA in text
        or any(needle.search(lower) for needle in _NEEDLES)
    )


def redact_text(text: str) -> str:
    """Return a text of any number of lines with its secrets replaced."""
    if not may_hold_secret(text):
        return text
    redactor = Redactor()
    return "".join(
        part if index % 2 else redactor.feed(part)
        for index, part in enumerate(re.split(r"([\r\n])", text))
    )


@dataclass(frozen=True)
class _Open:
    """A value that the end of a line has cut off."""

    kind: str  # value | more | quote | items | wrapped | named | pem
    name: str = ""
    option: bool = False
    mark: str = ""  # the quote that ends it
    width: int = 0  # of the line before
    lines: int = _VALUE_LINES  # that it may go on for


class Redactor:
    """Redacts a text line by line; a value may go on over the next ones."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._spans: list[tuple[int, int]] = []  # to be replaced, of the line under way

    @property
    def idle(self) -> bool:
        """Whether no value goes on: a line with nothing to redact may be left out then."""
        return self._open is None

    def feed(self, line: str) -> str:
        """Return one line, without its end, with its secrets replaced."""
        if not line or (self._open is None and not may_hold_secret(line)):
            return line
        self._spans = []
        at = self._go_on(line)
        if self._open is None:
            self._scan(line, at)
        pieces, last = list[str](), 0
        for begin, end in self._spans:
            if end > begin and not _REFERENCE.fullmatch(line, begin, end):
                pieces += [line[last:begin], REDACTED]
                last = end
        text = "".join([*pieces, line[last:]])
        ends_open = self._open is None

        def replace_form(match: re.Match[str]) -> str:
            if ends_open and match.end() == len(text) and len(line) >= _LEAST_WRAPPED:
                self._open = _Open("wrapped", width=len(line))
            if match["url"]:
                return f"://{REDACTED}@"
            return f"{match['bearer'] or ''}{REDACTED}"

        text = _FORM.sub(replace_form, text)
        if self._open is not None:
            self._open = replace(self._open, width=max(len(line), len(text)))
        return text

    # --- what the line before has left open

    def _go_on(self, line: str) -> int:
        """Finish the open value; return the position from which the line is its own."""
        known, self._open = self._open, None
        if known is None:
            return 0
        if not line.strip():
            self._keep(known)
            return len(line)
        if _RECORD.match(line):
            return 0
        if known.kind == "pem":
            last = _PEM_END.search(line)
            self._spans.append((0, last.start() if last else len(line)))
            if last is None:
                self._keep(known)
            return last.end() if last else len(line)
        at = len(line) - len(line.lstrip())
        if known.kind == "wrapped":
            return self._wrapped(line, known) if at == 0 else 0
        if known.kind == "named":
            match = _NAMED_VALUE.match(line)
            return 0 if match is None else self._value(line, match.end(), known.name, False, "")
        if known.kind == "quote":
            end = line.find(known.mark)
            if end >= 0 and not any(char.isspace() for char in line[at:end]):
                self._spans.append((at, end))
                return end + len(known.mark)
            return self._wrapped(line, known) if at == 0 else 0
        if known.kind == "items":
            return self._items(line, known)
        if known.kind == "more":
            return self._more(line, 0, known.name, "")
        return self._late_value(line, known, at)

    def _keep(self, known: _Open) -> None:
        if known.lines > 1:
            self._open = replace(known, lines=known.lines - 1)

    def _wrapped(self, line: str, known: _Open) -> int:
        match = _WRAPPED.match(line)
        if match is None or known.width < _LEAST_WRAPPED or not _looks_random(match.group()):
            return 0
        return self._word(line, *match.span())

    def _items(self, line: str, known: _Open) -> int:
        """Redact the items of a bracket, or of a YAML list, that goes on."""
        at = 0
        while match := _ITEM.match(line, at):
            begin, end = match.span("item")
            if known.mark == "-" and (at or not line[:begin].lstrip().startswith("-")):
                return at
            if line[begin] in "\"'":
                begin, end = begin + 1, end - 1
            self._spans.append((begin, end))
            at = match.end()
        rest = line[at:].strip()
        if known.mark == "-" or rest == "":
            self._keep(known)
        return at

    def _late_value(self, line: str, known: _Open, at: int) -> int:
        """Redact a value that stands on the line below its name."""
        if line.startswith("- ", at) and not known.option:
            self._open = _Open("items", known.name, mark="-", lines=_LIST_LINES)
            return self._items(line, replace(self._open, width=known.width))
        if line[at] in "-|&;<>#":
            return 0
        quoted = _QUOTE.match(line, at) is not None
        match = _SHELL.match(line, at)
        word = "" if match is None else match.group()
        alone = not line[at + len(word) :].strip(" \t\\,;)]}")
        wrapped = known.width >= _LEAST_WRAPPED and _looks_random(word)
        if not (quoted or alone or wrapped or (known.option and known.mark == "\\")):
            return 0
        end = self._value(line, at, known.name, known.option, "")
        return self._more(line, end, known.name, "") if _takes_several(known) else end

    # --- one line

    def _scan(self, line: str, at: int) -> None:
        while self._open is None:
            pem = _PEM.search(line, at)
            match = _NAME_END.search(line, at)
            if pem is not None and (match is None or pem.start() <= match.start()):
                last = _PEM_END.search(line, pem.end())
                self._spans.append((pem.end(), last.start() if last else len(line)))
                if last is None:
                    self._open = _Open("pem", lines=_KEY_LINES)
                at = last.end() if last else len(line)
            elif match is not None:
                begin = match.start()
                while begin > max(at, match.end() - _MOST_NAME) and _NAME.match(line[begin - 1]):
                    begin -= 1
                name = line[begin : match.end()]
                at = match.end()
                if is_secret(name):
                    at = max(at, self._after_name(line, begin, at, name))
            else:
                return

    def _after_name(self, line: str, begin: int, end: int, name: str) -> int:
        """Redact what belongs to a secret name; return the position behind it."""
        before = line[max(0, begin - _MOST_BEFORE) : begin]
        opening = _OPENING.search(before)
        mark = opening.group() if opening else ""
        closed = bool(mark) and line.startswith(mark, end)
        inside = "" if closed else mark
        option = name.startswith("-") and (not before or before[-1] in _BEFORE_OPTION)
        option = option or before.endswith(("\u2013", "\u2014", "\x93", "\x94"))
        if option and closed and (match := _NEXT_ARGUMENT.match(line, end)):
            return self._arguments(line, match.end())
        separator = _SEPARATOR.match(line, end)
        if separator is not None and option and ":" in separator.group() and not closed:
            return end
        if separator is None:
            if not option and not _ENV_WORD.search(before):
                if _ONLY_QUOTES.match(line, end) and _NAMED.search(before):
                    self._open = _Open("named", name)
                return end
            gap = _GAP.match(line, end)
            at = gap.end() if gap else end
            if (gap is None and at < len(line)) or line.startswith("-", at):
                return end
        else:
            at = separator.end()
        if _NO_VALUE.match(line, at):
            shell = line.rstrip().endswith("\\")
            self._open = _Open("value", name, option, "\\" if shell else "")
            return len(line)
        lower = name.lower()
        if lower.endswith("authorization"):
            header = _HEADER.match(line, at)
            at = header.end() if header else at
        if lower.endswith("cookie") and not _QUOTE.match(line, at):
            stop = _ANY_QUOTE.search(line, at)
            stop_at = stop.start() if stop else len(line)
            self._spans.append((at, stop_at))
            return stop_at
        starts_line = not option and _MARGIN.fullmatch(line, 0, begin) is not None
        if starts_line and ":" in line[end:at] and not _ENCLOSED.match(line, at):
            return self._whole(line, at, name)
        end = self._value(line, at, name, option or name.isupper(), inside)
        while again := _ASSIGNED.match(line, end):  # x: str = "..."
            if separator is None or ":" not in separator.group() or again.end() >= len(line):
                break
            end = self._value(line, again.end(), name, False, "")
        if option and _takes_several(_Open("more", name)) and self._open is None:
            return self._more(line, end, name, inside)
        return end

    def _whole(self, line: str, at: int, name: str) -> int:
        """Redact the rest of a line of YAML."""
        value = line[at:].rstrip()
        comment = value.find(" #")
        value = value if comment < 0 else value[:comment].rstrip()
        end = at + len(value)
        return end if _is_harmless(value, name) else self._word(line, at, end)

    def _word(self, line: str, at: int, end: int) -> int:
        """Redact a word, which may go on where a terminal wrapped the line; return its end."""
        self._spans.append((at, end))
        if end == len(line) and len(line) >= _LEAST_WRAPPED:
            self._open = _Open("wrapped")
        return end

    def _value(self, line: str, at: int, name: str, shell: bool, inside: str) -> int:
        """Redact one value; return the position behind it.

        Args:
            line: the line.
            at: where the value begins.
            name: whose value it is.
            shell: a space ends it, commas and brackets do not.
            inside: the quote within which name and value stand; "" for none.
        """
        if inside:
            stop = line.find(inside, at)
            stop = len(line) if stop < 0 else stop
            if not _is_harmless(line[at:stop], name):
                self._spans.append((at, stop))
            return stop
        quote = _QUOTE.match(line, at)
        if quote is not None:
            end = _closing_quote(line, quote.end(), quote[1])
            self._spans.append((quote.end(), len(line) if end < 0 else end))
            if end < 0:
                value = line[quote.end() :]
                self._open = None if _REFERENCE.fullmatch(value) else _Open("quote", mark=quote[1])
                return len(line)
            return end + len(quote[1])
        call = None if shell else _CALL.match(line, at)
        if call is not None or (line[at : at + 1] in tuple(_OPEN) and not shell):
            return self._bracket(line, call.end() if call else at + 1, name)
        word = (_SHELL if shell else _PLAIN).match(line, at)
        if word is None:
            return at
        if _is_harmless(word.group(), name):
            return word.end()
        return self._word(line, *word.span())

    def _bracket(self, line: str, at: int, name: str) -> int:
        """Redact what a bracket holds, as one."""
        end = _closing_bracket(line, at)
        content = line[at : len(line) if end < 0 else end]
        words = re.findall(r"[^\s,\"'()\[\]{}]+", content)
        if not all(_is_harmless(word, name) for word in words):
            self._spans.append((at, at + len(content)))
        if end < 0:
            self._open = _Open("items", name, lines=_LIST_LINES)
            return len(line)
        return end

    def _arguments(self, line: str, at: int) -> int:
        """Redact ``'a', 'b'`` up to the next option of an argument vector."""
        while quote := _ARGUMENT.match(line, at):
            end = _closing_quote(line, quote.end(), quote[1])
            self._spans.append((quote.end(), len(line) if end < 0 else end))
            at = len(line) if end < 0 else end + len(quote[1])
        return at

    def _more(self, line: str, at: int, name: str, inside: str) -> int:
        """Redact further values of an option that takes several."""
        while not _STOPS_OPTION.match(line, at) and self._open is None:
            gap = _GAP.match(line, at)
            begin = gap.end() if gap else at
            at = max(begin + 1, self._value(line, begin, name, True, inside))
        if self._open is None and _CONTINUED.match(line, at):
            self._open = _Open("more", name, True)
        return at


def _takes_several(known: _Open) -> bool:
    """Return True for the option that takes several values (``vllm serve --api-key a b``)."""
    return known.name.startswith("-") and known.name.lower().endswith(("key", "keys"))


def _looks_random(word: str) -> bool:
    """Return True for the rest of a secret rather than a word or a number."""
    digits = any(char.isdigit() for char in word)
    letters = any(char.isalpha() for char in word)
    mixed = word[1:] != word[1:].lower() and word != word.upper()
    return len(word) >= 16 or (letters and (digits or mixed) and len(word) >= 4)


def _is_harmless(value: str, name: str) -> bool:
    """Return True for a reference or no value at all, and for a count under a name of tokens."""
    counts = _NUMBER.fullmatch(value) and name.lower().endswith(_COUNTED)
    return bool(_REFERENCE.fullmatch(value) or counts)


def _closing_quote(line: str, at: int, mark: str) -> int:
    """Return the position of the quote that ends a string; -1 for none."""
    while (end := line.find(mark, at)) >= 0:
        first = end
        while len(mark) == 1 and first > 0 and line[first - 1] == "\\":
            first -= 1
        if (end - first) % 2 == 0:
            return end
        at = end + 1
    return -1


def _closing_bracket(line: str, at: int) -> int:
    """Return the position of the bracket that closes the one before ``at``; -1 for none."""
    depth = 1
    while at < len(line):
        char = line[at]
        if char in "\"'":
            end = _closing_quote(line, at + 1, char)
            if end < 0:
                return -1
            at = end
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1
