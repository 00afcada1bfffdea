"""Feeds ``memprof explain`` with spoilt logs: no traceback, no hang, no number that the log does
not hold.

Each round takes one of the logs in ``tests/data/logs``, or several in one paste. In every second
round it applies the kinds of dirt that befall logs, and every figure must be one of the clean logs:
the same, or fewer, never another. In the others it edits bytes at random, where any digit may
change: then the report must be made all the same.

What a report derives of a log of SGLang alone (its budget, term by term) is that of the clean log,
or unknown: there a line that is lost must not leave the least of fewer ranks.

Every log has lines with a marked secret, in all spellings. No report may hold the mark, unless
bytes were edited or a terminal has wrapped the lines: either may cut the name of a secret in two.

Round n of seed s is made by seed s + n alone. A round that fails prints its seed and keeps its
input:

    python -m tests.support.fuzz_explain [--seed S] [--seconds 60 | --rounds 1] [--keep FOLDER]

``make test`` runs it for a minute from seed 0, so that a failure there can be had again; ``make
fuzz`` from the time.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import time
import traceback
from pathlib import Path

from tests.support.secrets import BY_FORM, BY_NAME, MARK
from tests.unit.logs.dirt import HARMLESS, LOSSY, RENAMING, in_order
from tests.unit.logs.samples import OTHERS, SAMPLES
from vllm_memprof.accounting.build import build_report
from vllm_memprof.errors import MemprofError
from vllm_memprof.logs.figures import parse_lines
from vllm_memprof.logs.lines import read_chunks, read_lines
from vllm_memprof.logs.packed import logs_in
from vllm_memprof.logs.starts import StartSorter
from vllm_memprof.logs.to_record import to_runs
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.loader import Run

ROOT = Path(__file__).resolve().parents[2]

#: A round that takes longer is a hang.
ROUND_LIMIT_S = 20.0


#: Markup of one kind inside another, or a log of which only the middle is left, says other things
#: than the log.
_TOGETHER = 3
#: Notes give their lines another meaning by headings and by the order of lines: only dirt that
#: keeps both is for them.
_KEEPS_ORDER = ("cut_short", "repeated_lines", "timestamps")


def corpus() -> dict[str, str]:
    folder = ROOT / "tests" / "data" / "logs"
    logs = {
        path.name: path.read_text()
        for path in sorted(folder.iterdir())
        if path.suffix in (".log", ".md")
    }
    return {**logs, "every line": "\n".join(_engine_lines()), "other lines": "\n".join(OTHERS)}


def _engine_lines() -> list[str]:
    """The samples without lines that only a person writes: a few letters lost make another of
    those.
    """
    return [line for release, line, _ in SAMPLES if "by hand" not in release]


def edit(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, lost, doubled, moved."""
    spoilt = bytearray(data)
    for _ in range(rng.randrange(12)):
        at = rng.randrange(len(spoilt) + 1)
        size = rng.choice((1, 1, 2, 8, 64, 512))
        kind = rng.randrange(5)
        if kind == 0:
            spoilt[at:at] = rng.randbytes(size)
        elif kind == 1:
            del spoilt[at : at + size]
        elif kind == 2:
            spoilt[at:at] = spoilt[at : at + size]
        elif kind == 3:
            spoilt[at:at] = rng.choice(
                (b"\n", b"\r", b"\x1b[", b"(", b"pid=", b"9" * size, b"-", b".", b"GiB", b"\0")
            )
        else:
            other = rng.randrange(len(spoilt) + 1)
            spoilt[at:at] = spoilt[other : other + size]
    return bytes(spoilt)


def paste(texts: dict[str, str], rng: random.Random) -> list[str]:
    """Names of the logs of one round."""
    return rng.sample(sorted(texts), rng.choice((1, 1, 1, 2, 3)))


def dirty(names: list[str], texts: dict[str, str], rng: random.Random) -> tuple[bytes, bool]:
    """(the logs one after the other with secrets between them, with up to three harmless kinds of
    dirt, and one that loses lines or names; whether the names of the secrets are whole).
    """
    secrets = [rng.sample(BY_NAME + BY_FORM, 4) for _ in range(len(names) + 1)]
    parts = ["\n".join(secrets[0])]
    for name, lines in zip(names, secrets[1:], strict=True):
        parts += [texts[name], "\n".join(lines)]
    text: str | bytes = "\n\n".join(parts)
    notes = any(name.endswith(".md") for name in names)
    lossy = [kind for kind in sorted(LOSSY) if kind in _KEEPS_ORDER or not notes]
    kinds = {**HARMLESS, **RENAMING, **LOSSY}
    chosen = rng.sample(sorted(HARMLESS), rng.randrange(_TOGETHER + 1))
    more = [rng.choice(lossy), *([] if notes else [rng.choice(sorted(RENAMING))])]
    chosen += [kind for kind in more if rng.random() < 0.4]
    for kind in in_order(chosen):
        if isinstance(text, bytes):
            break
        text = kinds[kind](text, rng)
    whole = not any(kind.startswith("wrapped") for kind in chosen)
    return text.encode() if isinstance(text, str) else text, whole


Facts = set[tuple[str, "int | float"]]


def read(data: bytes) -> tuple[Facts, list[Run]]:
    """The way of the command, without its terminal.

    Raises:
        MemprofError: the log cannot be read, and says so.
    """
    ((_, stream),) = logs_in(io.BufferedReader(io.BytesIO(data)), "log")
    lines = list(parse_lines(read_lines(read_chunks(stream))))
    return {(figure.name, figure.value) for one in lines for figure in one.figures}, to_runs(
        StartSorter().sort(lines), "fuzz"
    )


def derived(run: Run) -> Facts:
    """Return what a report derives from the figures of a run, as far as it is known."""
    found: Facts = set()
    for rank in build_report(run).ranks:
        budget = rank.budget
        sizes = [("recomputed", budget.kv_cache_bytes), ("requested", budget.requested_bytes)]
        sizes += [("fits request", budget.fits_request_bytes), ("tokens", rank.kv.tokens)]
        sizes += [(term.name, term.bytes) for term in budget.terms]
        sizes += [(item.name, item.bytes) for item in budget.not_subtracted]
        found |= {(name, size) for name, size in sizes if size is not None}
    return found


def explain(
    data: bytes, allowed: Facts | None, secret: bool, derivable: Facts | None = None
) -> None:
    """Reads the log, makes the report, and checks what can be known of it.

    Args:
        data: the spoilt log.
        allowed: figures that the clean log holds; None where digits may have changed.
        secret: the marked secrets are whole, so that none may be in the report.
        derivable: what reports may derive; None where that is not known.
    """
    try:
        facts, runs = read(data)
    except MemprofError as error:
        if secret and MARK in f"{error} {error.hint}":
            raise AssertionError("a secret in an error") from error
        return
    if allowed is not None:
        assert facts <= allowed, f"figures that no clean line holds: {sorted(facts - allowed)}"
    for run in runs:
        if derivable is not None:
            more = derived(run) - derivable
            assert not more, f"derived of no clean log: {sorted(more)}"
        report = to_json(build_report(run))
        assert not secret or MARK not in json.dumps(report), "a secret in a report"
        assert not secret or MARK not in repr(run), "a secret in a record"
        assert report["run"]["source"] == "log"
        for rank in report["ranks"]:
            budget = rank["budget"]
            known = (
                budget["kv_cache_bytes"] is not None and budget["engine_kv_cache_bytes"] is not None
            )
            assert (
                (budget["residual_bytes"] is not None) == known == (budget["balanced"] is not None)
            )
        for process in run.processes:
            for name, value in process.figures.items():
                assert type(value) is int or (
                    type(value) is float and not name.endswith("_bytes")
                ), name


def one_round(
    seed: int, texts: dict[str, str], clean: dict[str, Facts]
) -> tuple[bytes, Facts | None, bool, str | None]:
    """(input, figures that it may hold, whether its secrets are whole, the log of SGLang that it is
    of alone) of a seed.
    """
    rng = random.Random(seed)
    names = paste(texts, rng)
    data, whole = dirty(names, texts, rng)
    if seed % 2:
        return edit(data, rng), None, False, None
    alone = names[0] if len(names) == 1 and names[0].startswith("sglang") else None
    return data, set().union(*(clean[name] for name in names)), whole, alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first round; from the time where not given"
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help="this many rounds instead of a time"
    )
    parser.add_argument(
        "--keep", type=Path, default=Path("build"), help="folder for an input that fails"
    )
    args = parser.parse_args()
    texts = corpus()
    clean = {name: read(text.encode())[0] for name, text in texts.items()}
    assert sum(map(len, clean.values())) > 100, "the clean logs hold no figures"
    derivable = {
        name: set().union(*(derived(run) for run in read(text.encode())[1]))
        for name, text in texts.items()
        if name.startswith("sglang")
    }
    assert all(derivable.values()), "the clean logs of SGLang derive nothing"
    first = args.seed if args.seed is not None else int(time.time())
    end = time.monotonic() + args.seconds
    rounds, size = 0, 0
    while rounds < args.rounds if args.rounds is not None else time.monotonic() < end:
        seed = first + rounds
        data, allowed, secret, alone = one_round(seed, texts, clean)
        begin = time.monotonic()
        try:
            explain(data, allowed, secret, None if alone is None else derivable[alone])
            assert time.monotonic() - begin < ROUND_LIMIT_S, "too slow"
        except Exception:
            args.keep.mkdir(parents=True, exist_ok=True)
            path = args.keep / f"fuzz-{seed}.log"
            path.write_bytes(data)
            traceback.print_exc()
            print(
                f"seed {seed} fails; its input is in {path}; again: --seed {seed} --rounds 1",
                file=sys.stderr,
            )
            return 1
        rounds += 1
        size += len(data)
    print(f"{rounds} logs, {size / 1e6:.1f} MB, seeds {first} to {first + rounds - 1}: no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
