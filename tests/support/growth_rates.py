"""Print how often the rule of growth finds a leak, and how often it finds one that is none.

python -m tests.support.growth_rates [SEEDS]      as the table in docs/concepts/growth.md; 1000 by default
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.support.series import HEAVY, MIB, NOISE, PLATEAUS, simulated
from vllm_memprof.accounting.serving.growth import LEAST_REQUESTS, LEAST_RISE_BYTES
from vllm_memprof.accounting.serving.trend import GROWING, trend

LEAKS = {"leak/1": "leak of 1 MiB each request", "leak/20": "leak of 20 MiB each 20 requests"}
Case = tuple[str, int, float]


def cases() -> Iterator[Case]:
    """Yield kind, requests and factor of the noise."""
    for kind in (*NOISE, *PLATEAUS, *LEAKS):
        for count in (200, 1000):
            for scale in (1, HEAVY):
                yield kind, count, scale


def rate(case: Case, seeds: int) -> tuple[int, float]:
    """Return the runs in which growth is found, and how far a leak's slope is off at most."""
    kind, count, scale = case
    found, worst = 0, 0.0
    for seed in range(seeds):
        result = trend(*simulated(kind, seed, count, scale), LEAST_RISE_BYTES, LEAST_REQUESTS)
        if result.verdict == GROWING:
            found += 1
            worst = max(worst, abs((result.slope or 0) / MIB - 1))
    return found, worst


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print("| readings | 200 requests | 200, noise x16 | 1,000 requests | 1,000, noise x16 |")
    print("|---|---|---|---|---|")
    listed = list(cases())
    with ProcessPoolExecutor() as pool:
        results = dict(zip(listed, pool.map(rate, listed, [seeds] * len(listed)), strict=True))
    for kind in dict.fromkeys(kind for kind, _, _ in listed):
        cells = []
        for (_, _, _), (found, worst) in (each for each in results.items() if each[0][0] == kind):
            share = f"{found / seeds:.1%}"
            cells.append(f"{share}, slope within {worst:.1%}" if kind in LEAKS else share)
        print(f"| {LEAKS.get(kind, kind)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
