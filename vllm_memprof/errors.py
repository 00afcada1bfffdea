"""The error tree. Every error a user may meet carries its exit status.

MemprofError                 exit 1
├── UsageError               exit 2   a wrong argument, an unknown profile, a bad size
├── RunRecordError           exit 3   a run folder or a log that cannot be read
├── LaunchError              exit 1   the engine could not be started or died
└── SetupError               exit 1   a simulated stack could not be installed or built
"""

from __future__ import annotations

from collections.abc import Iterable


class MemprofError(Exception):
    """Base of the errors that a user may meet.

    Args:
        message: what failed and where, one sentence; a line of a log that it quotes is redacted.
        hint: what to try next; printed on its own line.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        from vllm_memprof.redact import redact_text  # its patterns take a tenth of --help
        from vllm_memprof.text import plain

        self.message = plain(redact_text(message))
        self.hint = None if hint is None else plain(redact_text(hint))
        super().__init__(self.message)


class UsageError(MemprofError):
    exit_code = 2


class RunRecordError(MemprofError):
    exit_code = 3


class LaunchError(MemprofError):
    pass


class SetupError(MemprofError):
    pass


def nearest(name: str, known: Iterable[str], most: int = 1, alike: float = 0.6) -> list[str]:
    """Return the known names that are most like a misspelt one, in any case; the best first.

    ``alike``: how like they are at least, of 1.
    """
    from difflib import get_close_matches

    spelt = {each.lower().replace("_", "-"): each for each in known}
    asked = name.lower().replace("_", "-")
    return [spelt[each] for each in get_close_matches(asked, spelt, most, alike)]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint: what is known and like a misspelt name, or else another one."""
    found = nearest(name, known, 3)
    return f"did you mean {' or '.join(found)}?" if found else otherwise


def require_known(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not one of those that are known.

    Raises:
        UsageError: with those that are.
    """
    listed = list(known)
    if name not in listed:
        near = "".join(f"nearest: {each}; " for each in nearest(name, listed))
        hint = f"{near}one of {', '.join(listed)}"
        raise UsageError(f"{what} {name!r} is not known", hint=hint)
