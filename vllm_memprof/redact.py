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
from functools import lru_cache
from pathlib import Path
from typing import Any

REDACTED = "***"


@lru_cache(None)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.ASCII)


#: A name is secret when it ends with one of these, whatever joins the words.
_SECRET_ENDING = _pattern(
    r"(?:(?:api|access)keys?|accesskeyid|secretid"
    r"|(?:account|aes|app|auth|deploy|encrypt|encryption|hmac|license|master|private|secret|shared|signing"
    r"|ssh|subscription)key|privatekeyid|clientkeydata|dockerconfigjson|dockercfg"
    r"|token|(?:api|access|auth|hf)tokens|secrets?|passwords?|passwordhash|passwd"
    r"|passphrase|(?:ssh|store|key|require)pass|masterauth|(?:bind|root)pw|psk|authtok|credentials?"
    r"|authorization|cookies?)$(?<!eostoken|bostoken|padtoken)(?<!perstoken)(?<!pertoken)"
    r"(?<!keepsecrets)"
)
#: Last words of names of Huawei Cloud (HUAWEICLOUD_SDK_AK, obs_sk).
_SHORT_WORDS = ("ak", "sk")
#: What ``pass`` and ``pwd`` stand behind: a pass of a model is none.
_WHOSE = _pattern(
    "user|db|database|admin|login|auth|smtp|mail|email|imap|ftp|ssh|sudo|proxy|redis|mq|mongo|mysql"
    "|pg|postgres|default|become|service|client|tls|ssl|store|rabbitmq|registry|harbor|nexus|git|http|root|vnc|ldap|wifi|key|keystore"
)
#: Names of variables, in capitals: what may follow the name; what holds a secret anywhere in its
#: name, but for what tells where it is; a KEY of something else.
_MORE_NAME = _pattern(
    "(?:_(?:[0-9]+|[A-Z]|READ|WRITE|R[OW]|OLD|NEW|PROD|DEV|TEST|STAGING|BACKUP|BASE64|B64|VALUE"
    "|RAW))+$"
)
_SECRET_VARIABLE = _pattern(
    ".*(?:SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIALS?)_(?!.*(?:FILE|PATH|DIR|NAME|URL|COUNT|TYPE"
    "|LEN(?:GTH)?)$).*|.*(?<!CACHE)(?<!PUBLIC)(?<!PRIMARY)(?<!SORT)(?<!HASH)(?<!GROUP)(?<!ROUTE)"
    "(?<!INDEX)(?<!LOOKUP)(?<!BLOCK)(?<!DICT)(?<!FOREIGN)(?<!PARTITION)(?<!SHARD)_KEY|.+_P(?:AT|ASS|WD)"
)
#: Ends of names whose numbers are counts: ``token: 12``, ``sk=128``.
_COUNTED = ("token", "tokens", *_SHORT_WORDS)
#: A name that ends with one of these words and ``token`` names a token of text.
_TEXT_TOKEN = _pattern(
    "added|assistant|audio|begin|bos|bot|cls|document|draft|each|end|eod|eom|eos|eot|every|extra"
    "|first|frame|generated|image|img|input|invalid|last|mask|max|min|new|next|num|output|pad|per"
    "|placeholder|prefix|prompt|reasoning|sampled|sep|separator|special|start|stop|suffix|think"
    "|tool|unexpected|unk|user|video|vision"
)
#: Variables that bear on device memory. Everything else stays out of the record.
_MEMORY_ENV = _pattern(
    "PYTORCH_(NPU_|CUDA_)?ALLOC_CONF|PYTORCH_NO_(NPU|CUDA)_MEMORY_CACHING"
    "|MULTI_STREAM_MEMORY_REUSE|TASK_QUEUE_ENABLE|P2P_HCCL_BUFFSIZE|LD_PRELOAD|OMP_NUM_THREADS"
    "|(CUDA|NVIDIA)_VISIBLE_DEVICES|(HCCL|NCCL|ASCEND|ACL|ATB|VLLM|MEMPROF)_.*"
)
_WORDS = _pattern(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@lru_cache(4096)
def is_secret(name: str) -> bool:
    """Return True where an option, variable or JSON key of this name has a secret value.

    Singular ``token`` counts (``--hf-token``), the plural does not (``--max-num-batched-tokens``),
    nor does a token of text (``bos_token``).
    """
    name = name[-128:]
    if name.isupper():
        name = _MORE_NAME.sub("", name)
        if _SECRET_VARIABLE.fullmatch(name):
            return True
    words = [word.lower() for word in _WORDS.findall(name)]
    if words and words[-1] in _SHORT_WORDS:
        return True
    if words[1:] and words[-1] in ("pass", "pwd", "pw"):
        return words[-2] == "pass" or _WHOSE.fullmatch(words[-2]) is not None
    if not _SECRET_ENDING.search(re.sub(r"[^a-z0-9]", "", name.lower())):
        return False
    return not (words[-1:] == ["token"] and words[-2:-1] and _TEXT_TOKEN.fullmatch(words[-2]))


def redact_command(command: Sequence[str]) -> list[str]:
    """Return the command with its secrets replaced.

    The forms ``--name value``, ``--name=value``, ``NAME=value`` and JSON are covered, and every
    form of a secret. A secret option may take several values (vLLM's ``--api-key``): all up to the
    next option are replaced.
    """
    redacted: list[str] = []
    in_secret, said = False, " ".join(command)
    of_program = {
        match["secret"]
        for words, form in _COMMANDS
        if len(command) > 1 and _has(said.lower(), words)
        for match in _pattern(form).finditer(said)
    }
    for token in command:
        name, equals, value = token.partition("=")
        option = token.startswith("-")
        secret = " " not in name and is_secret(name)
        if option:
            in_secret = not equals and secret
        if equals and secret and not _REFERENCE.fullmatch(value):
            redacted.append(f"{name}={REDACTED}")
        elif option and equals:
            redacted.append(f"{name}={_redact_value(value)}")
        else:
            secret = (in_secret and not option) or token in of_program
            redacted.append(REDACTED if secret else _redact_value(token))
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
    # a record has the same short texts again and again
    return _redact_short(value) if len(value) < 200 else _redact_any(value)


def _redact_any(value: str) -> str:
    if value.lstrip().startswith(("{", "[")):
        try:
            data = json.loads(value)
            cleaned = redact_data(data)
        except (ValueError, RecursionError):
            return redact_text(value)
        return value if cleaned == data else json.dumps(cleaned)
    return redact_text(value)


_redact_short = lru_cache(4096)(_redact_any)


def redact_data(data: Any, name: str = "") -> Any:
    """Return JSON data with its secrets replaced: by key, by form, and in lists of arguments.

    Args:
        data: dictionaries, lists and plain values; others are returned as they are.
        name: the key that the data stands under.
    """
    if isinstance(data, dict):
        if data.get("kind") == "Secret":
            data = {**data, **{key: REDACTED for key in ("data", "stringData") if data.get(key)}}
        beside = (data.get(key) for key in ("name", "Name", "key", "Key"))
        # {"name": "HF_TOKEN", "value": ...}
        named = next((each for each in beside if isinstance(each, str)), "value")
        return {
            key: redact_data(value, named if key in ("value", "Value") else str(key))
            for key, value in data.items()
        }
    secret = is_secret(name)
    if isinstance(data, str) and name.lower() in ("auth", "_auth", "pwd"):
        secret = any(map(str.isdigit, data)) and data[0] not in "/~."
    if isinstance(data, (list, tuple)):
        if data and not secret and all(isinstance(item, str) for item in data):
            return redact_command(data)
        return [redact_data(item, name if secret else "") for item in data]
    if secret and data not in (None, "", True, False):
        counts = isinstance(data, (int, float)) and name.lower().endswith(_COUNTED)
        return data if counts else REDACTED
    return _redact_value(data) if isinstance(data, str) else data


# --- text

#: In lower case, what every secret contains: an end of a name that ``is_secret`` accepts, or the
#: beginning of a form. Each word costs 1.3 s per GiB, and each pattern about as much: it begins
#: with a rare letter, for which a text is searched fast.
_NEEDLE_WORDS = ("secret", "credent", "passphr", "pwd")
_NEEDLES = tuple(
    _pattern(pattern)
    for pattern in (
        r"k(?:ey|ie(?<=cookie)|(?<=[^a-z][as]k)[-=:'\" ]|en(?<=token)(?:(?![a-z])"
        r"|s(?:(?<=hf.tokens)|(?<=(?:api|uth|ess).tokens))))",
        r"w(?<=passw)",
        r"z(?<=uthoriz)",
        r"pass(?![a-z])",
        r"data(?:\\*['\"])?:\s*\{?\s*(?:\\+[nr]|[\r\n]|$)",
    )
)


def _spelt(word: str) -> list[str]:
    """Return a word as it is, as bytes that are read as latin-1, and escaped within JSON."""
    return [word, word.encode().decode("latin-1"), json.dumps(word)[1:-1]]


_Form = tuple[tuple[str, ...], str]


def _read_forms() -> tuple[list[_Form], list[_Form]]:
    """Return (words of which a text with a form has one, in lower case; the form), the programs'
    options among them, and those alone. Compiled are those that a text may have: all of them take
    longer than the start of a command.
    """
    table = json.loads(Path(__file__).with_name("secrets.json").read_text(encoding="utf-8"))
    tails, found = table["tails"], list[tuple[tuple[str, ...], str]]()
    for prefix, tail in table["prefixes"].items():
        form = rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])){re.escape(prefix)}{tails.get(tail, tail)}"
        found.append(((prefix.lower(),), form))
    for words, form in table["forms"].values():
        form = form.replace("<mixed>", tails["mixed"]).replace("[\"']", "\\\\*[\"']")
        words = [spelt.lower() for word in words for spelt in _spelt(word)]
        form = re.sub(
            r"[^\0-\x7f]+", lambda match: f"(?:{'|'.join(map(re.escape, _spelt(match[0])))})", form
        )
        found.append((tuple(dict.fromkeys(words)), form))
    commands = list[_Form]()
    for program, (words, options) in table["commands"].items():
        form = (
            rf"(?<![\w-]){program}(?![\w-])[^|;&\n]{{0,300}}?[\s'\",](?:{options})"
            r"""\\*['"]?[\s=,]*\\*['"]?(?P<secret>(?!\*\*\*)(?:[^\s'",;|\\]|\\(?!["']))+)"""
        )
        commands.append((words, form))
    return [*found, *commands], commands


_FORMS, _COMMANDS = _read_forms()
#: Without those that a needle finds, or a shorter one.
_OF_FORMS = tuple(
    word
    for words in [
        {
            word
            for words, _ in _FORMS
            for word in words
            if not any(needle.search(word) for needle in _NEEDLES)
        }
    ]
    for word in sorted(words)
    if not any(other in word for other in {*words, *_NEEDLE_WORDS} - {word})
)
#: All that an ASCII text without escapes may hold.
_PLAIN_WORDS = tuple(word for word in _OF_FORMS if word.isascii() and "\\u" not in word)

#: A private key, or a word that may be a name.
_NAME = _pattern(
    r"(?P<key>-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|Private-Lines:)"
    r"|(?<![A-Za-z0-9_.])-{0,4}[A-Za-z0-9_.]+(?:-{1,4}[A-Za-z0-9_.]+)*"
)
_KEY_END = _pattern(r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|Private-MAC:")
#: A line of a private key behind what a log puts before it.
_KEY_LINE = _pattern(r"(?<=[\s>|])(?P<word>[A-Za-z0-9+/]{4,}={0,2})\s*$")
#: What may follow a name and precede its value: ``'name': value``, ``name = value``,
#: ``environ['NAME'] = value``, ``name: str = value``, ``"name": "X", "value": "..."``.
_SEPARATOR = _pattern(
    r"""(?i)(?:\\*["'])?\]?\s*(?::\s*(?:[Ss]tr(?:ing)?|bytes|SecretStr|\w+\[[\w |]+\])\s*=(?!=)"""
    r"""|=>|:=|(?<!=)=(?!=)|:(?!:|//)|\uff1a|\\uff1a|\xef\xbc\x9a)\s*(?:(?:!!?\w+|&\w+)[ \t]+)?"""
    r"""|(?:\\*["']\s*,?|\\n)\s*\\*["']?(?:value|default)\\*["']?\s*[:=]\s*"""
)
_GAP = _pattern(r"(?:(?:\s|\\[nrt])+(?:- (?=[^\s-]))?|$)(?!-)")
#: What precedes a name: the quote that it stands in; what an option stands behind; ``ENV``; the
#: ``name:`` beside whose value it stands; the margin of a line of YAML.
_OPENING = _pattern(r"(?:\\*[\"'])?$")
_OPTION = _pattern("(?:^|[ \t\"'`([{,=|;&>/])-$|[\u2013\u2014\x93\x94]$")
_ENV_WORD = _pattern(r"\b(?:ENV|setenv|setx|configure set|config set|set -\w+)\s$")
_NAMED = _pattern(r"""\b(?:name["']?\s*[:=]|variable)\s*["']?$""")
_MARGIN = _pattern(r"[ \t>|-]*")
_MOST_BEFORE = 32
_NO_VALUE = _pattern(r"(?:[|>]-?)?[ \t\\]*$")
_SCHEME = _pattern(r"(?i:(?:Bearer|Basic|Token|Digest|ApiKey)\s+)")

#: Values, by where they stand. ``quoted``, ``content`` or ``word`` is replaced.
_PREFIX = r"(?:[bBrRfFuU]{1,2})?"
_QUOTED = (
    rf"""{_PREFIX}(?P<mark>\\*["'`])(?P<quoted>(?:(?!(?P=mark))(?:\\.|.))*)(?P<closed>(?P=mark))?"""
)
_BRACKET = (
    r"""(?:[A-Za-z_][\w.]{0,40}(?=\())?[(\[{](?P<content>(?:[^"'()\[\]{}]|"(?:\\.|[^"\\])*"?"""
    r"""|'(?:\\.|[^'\\])*'?|[(\[{][^()\[\]{}]*[)\]}])*)(?P<shut>[)\]}])?"""
)
_BARE = r"""(?:[^\s"'`;|&<>\\]|\\\S)+"""
_SHELL = _pattern(rf"{_QUOTED}|(?P<word>{_BARE})")
_WORD = r"""(?P<word>[^\s,;)}\]&|"'<>`\\]+)"""
_PLAIN = _pattern(f"{_QUOTED}|{_BRACKET}|{_WORD}")
_SCHEMED = _pattern(f"{_QUOTED}|{_WORD}")  # no bracket: a name before one is of the secret
_LINE = _pattern(
    rf"(?!{_PREFIX}[\\*]*[\"'`]|[(\[{{<,;)}}\]])(?:- +)?(?P<word>\S(?:(?! #).)*(?<!\s))"
)
_COOKIE = _pattern(r"(?P<word>[^\"'`]+)")
_REST = _pattern(r"(?P<word>.+)")
_ARGUMENT = _pattern(rf"""(?:\\*["'])?\s*,\s*(?!\\*["']-)(?=\\*["']){_QUOTED}""")
_MORE = _pattern(rf"\s+(?!\\*[\"'`]-)(?:{_QUOTED}|(?P<word>(?![-#)\]}},]){_BARE}))")
#: Values that hold no secret: none at all, a reference to a variable, a secret that was replaced.
_REFERENCE = _pattern(
    r"(?:None|null|nil|True|False|true|false|\$\{?\w+\}?|\$\([^)]*\)|%\w+%|\**|\.\.\.)"
)
_NUMBER = _pattern(r"[-+]?[\d.,]+(?:[eE][-+]?\d+)?%?")
_PARTS = _pattern(r"[^\s,\"'()\[\]{}]+")

#: The beginning of a log record: it never continues the line before it.
_RECORD = _pattern(
    r"^.{0,70}?(?:\(\w[^()]{0,60}\bpid=\d"
    r"|\b(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b[:\s\]])"
    r"|^\W{0,3}(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|Traceback )"
)
#: The rest of a value that a terminal has wrapped: a long word, or one of letters and digits, or of
#: capitals among others.
_OF_IT = "[A-Za-z0-9_+/=.~-]"
_WRAPPED = _pattern(
    rf"(?!--?[a-z]|\w+=[^=\s])(?:(?={_OF_IT}{{16}})|(?={_OF_IT}{{4}})(?:(?={_OF_IT}*[A-Za-z])(?={_OF_IT}*\d)"
    rf"|(?={_OF_IT}+[A-Z])(?={_OF_IT}*[a-z]))){_OF_IT}+(?=$|[\s\"'`,;)}}\]\\&|])(?!\s*[=:])"
)
#: Lines shorter than this were not wrapped by a terminal.
_LEAST_WRAPPED = 36
_ENTRY = r"""\W{1,24}[\w.-]+["']?:\s+["']?(?P<secret>"""
#: How a value goes on -> the next line of it; lines over which it may. It is cut off; it stands
#: below its name, or its option, or behind the end of a line of a shell; it is a list, one of YAML,
#: what stands beside ``name:``, or a private key.
_BELOW = rf"""\s*(?:{_PREFIX}\\*["'`]|(?![-|&;<>#]|.*\*\*\*){_BARE}[ \t\\,;)\]}}]*$)"""
_GOES_ON = {
    "cut": (_pattern(r"(?!)"), 2),
    "below": (_pattern(rf"\s*- |{_BELOW}"), 2),
    "option": (_pattern(rf"\s*- (?!-)|{_BELOW}"), 2),
    "shell": (_pattern(r"\s*(?![-|&;<>#])"), 40),
    "list": (_pattern(""), 40),
    "items": (_pattern(r"\s*- "), 40),
    "named": (_pattern(r"""\W{0,20}(?:value|default)["']?\s*[:=]"""), 2),
    "key": (_pattern(""), 200),
    "data": (
        _pattern(
            rf"{_ENTRY}(?=[a-z\d+/]*[A-Z])(?=[A-Z\d+/]*[a-z])(?:[A-Za-z\d+/]{{6,}}={{0,2}}|[A-Za-z\d+/]{{2,5}}={{1,2}}))\W*$"
        ),
        40,
    ),
    "stringData": (_pattern(rf"{_ENTRY}[^\s*|>\"'][^\"']*)\W*$"), 40),
}
#: Where the entries of a Secret of Kubernetes begin, and the name of one.
_DATA = _pattern(r"(?:.*\s)?[\"']?(data|stringData)[\"']?:\s*\{?\s*$")


def may_hold_secret(text: str) -> bool:
    """Return False for a text in which there is nothing to redact; it costs far less than a look
    for secrets."""
    lower = f"\n{text.lower()}"  # a name may begin the text
    return (
        _has(lower, _NEEDLE_WORDS)
        or any(needle.search(lower) for needle in _NEEDLES)
        or _has(lower, _PLAIN_WORDS if lower.isascii() and "\\u" not in lower else _OF_FORMS)
    )


def _has(text: str, words: Sequence[str]) -> bool:
    for word in words:  # noqa: SIM110 - for each line of a log, where a generator takes long
        if word in text:
            return True
    return False


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
    """A value that the end of a line has cut off, or that stands below its name."""

    kind: str  # of ``_GOES_ON``
    before: str
    lines: int  # that it may go on for
    wide: bool = False  # a terminal may have wrapped the line

    def before_line(self, line: str) -> str:
        """Return what a line is read behind, for it to have more of the value; "" for none."""
        if _RECORD.match(line) and (self.kind != "key" or not _KEY_LINE.search(line)):
            return ""
        name = self.before.rstrip("'\"`\\")
        rest, closed, _ = line.strip().partition(self.before[len(name) :] or "\0")
        if closed and not any(map(str.isspace, rest)):
            return self.before
        rest = line.lstrip() if self.kind in ("below", "option") else line
        if self.wide and _WRAPPED.match(rest):
            return name
        return self.before if _GOES_ON[self.kind][0].match(line) else ""


class Redactor:
    """Redacts a text line by line; a value may go on over the next ones."""

    def __init__(self) -> None:
        self._open: _Open | None = None

    @property
    def idle(self) -> bool:
        """Whether no value goes on: a line with nothing to redact may be left out then."""
        return self._open is None

    def feed(self, line: str) -> str:
        """Return one line, without its end, with its secrets replaced."""
        known, self._open = self._open, None
        if known is not None and not line.strip():
            if line and known.lines > 1:
                known = replace(known, lines=known.lines - 1)
            self._open = known
            return line
        if known is not None and known.kind.endswith("ata"):
            entry = _GOES_ON[known.kind][0].match(line)
            if entry:
                self._open = known
                return f"{line[: entry.start('secret')]}{REDACTED}{line[entry.end('secret') :]}"
        before = "" if known is None else known.before_line(line)
        if data := _DATA.match(line):
            self._keep(data[1], "")
            return line
        if not before and not may_hold_secret(line):
            return line
        wide, cut, lower = len(line) >= _LEAST_WRAPPED, False, line.lower()

        def replace_form(match: re.Match[str]) -> str:
            nonlocal cut
            whole, (begin, end) = match[0], match.span(match.lastgroup or 0)
            cut = cut or end == len(match.string)
            return f"{whole[: begin - match.start()]}{REDACTED}{whole[end - match.start() :]}"

        # forms first: a name is read where it stands at last
        forms, known_as = [_pattern(form) for words, form in _FORMS if _has(lower, words)], ""
        while known_as != line:  # one secret may end where the next begins
            known_as = line
            for form in forms:
                line = form.sub(replace_form, line)
        if before and known is not None and known.kind == "key" and _RECORD.match(line):
            before = ""
            self._open = known if _KEY_END.search(line) is None else None
            line = _KEY_LINE.sub(REDACTED, line)
        text = before + line
        pieces, last = list[str](), len(before)
        for begin, end in self._spans(text):
            begin = max(begin, last)
            if end > begin and not _REFERENCE.fullmatch(text, begin, end):
                pieces += [text[last:begin], REDACTED]
                last = end
        text = "".join([*pieces, text[last:]])
        if cut and self._open is None:
            self._keep("cut", "token=")
        if self._open is not None:
            same = before and known is not None and known.kind == self._open.kind
            lines = known.lines - 1 if same and known is not None else self._open.lines
            self._open = replace(self._open, lines=lines, wide=wide) if lines else None
        return text

    def _keep(self, kind: str, before: str) -> None:
        self._open = _Open(kind, before, _GOES_ON[kind][1])

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return what is to be replaced in a text, and keep what its end cuts off."""
        spans: list[tuple[int, int]] = []
        at = 0
        while self._open is None and (match := _NAME.search(text, at)):
            begin, at = match.span()
            if match["key"]:
                end = _KEY_END.search(text, at)
                spans.append((at, end.start() if end else len(text)))
                at = end.end() if end else len(text)
                if end is None:
                    self._keep("key", match["key"])
            elif is_secret(match[0]):
                at = self._values(text, begin, at, spans)
        return spans

    def _values(self, text: str, begin: int, at: int, spans: list[tuple[int, int]]) -> int:
        """Add what belongs to a secret name; return the position behind it."""
        name, before = text[begin:at].lstrip("-"), text[max(0, begin - _MOST_BEFORE) : begin]
        option = _OPTION.search(before + text[begin : at - len(name)][:1]) is not None
        behind = at
        opening = _OPENING.search(before)
        mark = opening.group() if opening else ""
        closed = mark != "" and text.startswith(mark, at)
        separator, limit = _SEPARATOR.match(text, at), len(text)
        form, more = _SHELL if option or name.isupper() else _PLAIN, None
        if option and closed and _ARGUMENT.match(text, at):
            form = more = _ARGUMENT
        else:
            if separator is None and not option and not _ENV_WORD.search(before):
                if _NAMED.search(before) and not text[at:].strip("\"', {"):
                    self._keep("named", f'{name}",')
                return at
            gap = separator or _GAP.match(text, at)
            if gap is None or (separator and option and not closed and ":" in separator.group()):
                return at
            at = gap.end()
            if _NO_VALUE.match(text, at):
                shell = option and text.rstrip().endswith("\\")
                kind = "shell" if shell else "option" if option else "below"
                self._keep(kind, text[begin:at] + ("" if separator else " "))
                return limit
            if name.lower().endswith("authorization") and text[at] not in "\"'":
                scheme = _SCHEME.match(text, at)
                at, form = (at, _COOKIE) if scheme is None else (scheme.end(), _SCHEMED)
            if name.lower().endswith("cookie") and text[at] not in "\"'":
                form = _COOKIE
            elif mark and not closed:
                stop = re.compile(rf"(?<!\\){re.escape(mark)}").search(text, at)
                form, limit = _REST, stop.start() if stop else limit
            elif not option and _MARGIN.fullmatch(text, 0, begin):
                if text.startswith("- ", at):
                    self._keep("items", text[begin:at])
                if form is _SCHEMED:
                    form = _REST
                elif _LINE.match(text, at) and (self._open or ":" in text[behind:at]):
                    form = _LINE
            if option and name.lower().endswith(("key", "keys")):
                more = _MORE
        found, counts = form.match(text, at, limit), name.lower().endswith(_COUNTED)
        while found is not None:
            last = found.lastgroup or ""
            group = {"closed": "quoted", "shut": "content"}.get(last, last)
            (start, end), at = found.span(group), found.end()
            parts = _PARTS.findall(found[group]) if group == "content" else [found[group]]
            if last == "content":  # without its end
                end = at = len(text)
                self._keep("list", f"{name}=[")
            elif group != "quoted" and all(
                _REFERENCE.fullmatch(part) or (counts and _NUMBER.fullmatch(part)) for part in parts
            ):
                start = end  # a reference, no value at all, or a count
            elif end == len(text) and form not in (_COOKIE, _REST) and self._open is None:
                self._keep("cut", f"{name}={found['mark'] if group == 'quoted' else ''}")
            spans.append((start, end))
            found = more.match(text, at) if more is not None and self._open is None else None
        if more is _MORE and self._open is None and text[at:].strip() == "\\":
            self._keep("shell", f"{text[begin:behind]} ")
        return at
