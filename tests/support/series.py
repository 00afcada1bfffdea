"""Simulated readings of a served engine: one per request, for tests of the rule of growth.

Positions are requests finished, values bytes. Each kind of noise and of plateau has its random
parameters from the seed, so that a rate over many seeds is one over many kinds of runs. Noise is of
an ordinary size; multiplied by ``HEAVY`` it is larger than what a leak of 1 MiB adds in tens of
requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

MIB = 1 << 20
HEAVY = 16
Series = tuple[list[float], list[float]]


def in_flight(rng: random.Random, count: int) -> list[float]:
    """What requests hold for a while: load that swings up to 32 of them, in 512-byte blocks."""
    size, most = rng.uniform(0.01, 0.25) * MIB, rng.randint(2, 32)
    period = rng.uniform(20, 400)
    held = []
    for at in range(count):
        load = most * (0.5 + 0.4 * math.sin(at / period)) + rng.gauss(0, most / 6)
        held.append(round(max(load, 0) * size / 512) * 512)
    return held


def correlated(rng: random.Random, count: int) -> list[float]:
    """Noise that remembers up to some fifty requests, of up to 2 MiB."""
    keep, size, at = rng.uniform(0, 0.98), rng.uniform(0.1, 2) * MIB, 0.0
    found = []
    for _ in range(count):
        at = keep * at + math.sqrt(1 - keep * keep) * rng.gauss(0, size)
        found.append(at)
    return found


def wandering(rng: random.Random, count: int) -> list[float]:
    """A resident set as it wanders: each request adds or gives back some pages, for good."""
    size, at = rng.uniform(0.004, 0.125) * MIB, 0.0
    found = []
    for _ in range(count):
        at += rng.gauss(0, size)
        found.append(round(at / 4096) * 4096)
    return found


def sawtooth(rng: random.Random, count: int) -> list[float]:
    """Garbage that grows until it is collected."""
    period, size = rng.randint(5, 60), rng.uniform(0.01, 0.1) * MIB
    start = rng.randrange(period)
    return [((start + at) % period) * size for at in range(count)]


def largest_so_far(rng: random.Random, count: int) -> list[float]:
    """Reserved memory: the most that any request needed yet, sizes with a heavy tail."""
    shape, size, most = rng.uniform(1.5, 5), rng.uniform(4, 64) * MIB, 0.0
    found = []
    for _ in range(count):
        most = max(most, min(rng.paretovariate(shape), 50) * size)
        found.append(math.ceil(most / (20 * MIB)) * 20.0 * MIB)
    return found


def exponential(rng: random.Random, count: int) -> list[float]:
    """A cache that fills ever more slowly; its time constant is up to 0.4 of the run."""
    constant, size = rng.uniform(0.02, 0.4) * count, rng.uniform(64, 4096) * MIB
    return [size * (1 - math.exp(-at / constant)) for at in range(count)]


def filled(rng: random.Random, count: int) -> list[float]:
    """A cache that fills at an even rate and is full by 0.8 of the run at the latest."""
    full, size = rng.uniform(0.05, 0.8) * count, rng.uniform(64, 4096) * MIB
    return [size * min(at / full, 1) for at in range(count)]


def late_steps(rng: random.Random, count: int) -> list[float]:
    """One to five steps anywhere: communicators, workspace, another size of a graph."""
    steps = [(rng.uniform(0, count), rng.uniform(8, 512) * MIB) for _ in range(rng.randint(1, 5))]
    return [sum(size for at, size in steps if at <= now) for now in range(count)]


NOISE: dict[str, Callable[[random.Random, int], list[float]]] = {
    "in flight": in_flight,
    "correlated": correlated,
    "wandering": wandering,
    "sawtooth": sawtooth,
}
PLATEAUS: dict[str, Callable[[random.Random, int], list[float]]] = {
    "exponential": exponential,
    "filled": filled,
    "late steps": late_steps,
    "largest so far": largest_so_far,
}


def leak(rng: random.Random, count: int, per_request: float, every: int = 1) -> list[float]:
    """``per_request`` bytes on average, in steps of ``every`` requests."""
    start = rng.randrange(every)
    return [per_request * every * ((at + start) // every) for at in range(count)]


def times(values: list[float], factor: float) -> list[float]:
    return [value * factor for value in values]


def series(*parts: list[float]) -> Series:
    """The sum of parts on a base of 20 GiB, at the positions 1, 2, ..."""
    return (
        [float(at) for at in range(1, len(parts[0]) + 1)],
        [20 * 1024 * MIB + sum(values) for values in zip(*parts, strict=True)],
    )


def simulated(kind: str, seed: int, count: int, scale: float = 1) -> Series:
    """One run of ``count`` requests: of a kind of noise or plateau, or ``leak/N``, N requests a step.

    ``scale`` multiplies the noise; a plateau and a leak have noise of a kind that the seed chooses.
    """
    rng = random.Random(f"{seed} {kind} {count}")
    if kind in NOISE:
        return series(times(NOISE[kind](rng, count), scale))
    noise = times(rng.choice(list(NOISE.values()))(rng, count), scale)
    if kind in PLATEAUS:
        return series(PLATEAUS[kind](rng, count), noise)
    every = int(kind.removeprefix("leak/"))
    return series(leak(rng, count, MIB, every), noise)
