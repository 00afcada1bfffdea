"""A record of many ranks, made from one of two: each with some MiB of its own outside torch."""

from __future__ import annotations

import json
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "data" / "recorded_023_tp2"
_MIB = 1 << 20
#: Fields of a snapshot that hold what lies outside torch, and their sign.
_OUTSIDE_TORCH = {"device_free_bytes": -1, "non_torch_bytes": 1, "process_bytes": 1}
#: The same of the engine's figures, so that they agree with the snapshots.
_FIGURES_OUTSIDE_TORCH = {
    "initial_free_bytes": -1,
    "profile_after_free_bytes": -1,
    "initial_non_torch_bytes": 1,
    "profile_before_non_torch_bytes": 1,
    "profile_after_non_torch_bytes": 1,
}


def write_many_ranks(folder: Path, ranks: int, outlier: int | None = None) -> Path:
    """Writes ``run.json`` and one event file per rank; the outlier has 2 GiB more than the others.

    Returns:
        The folder.
    """
    (folder / "events").mkdir(parents=True)
    (folder / "run.json").write_bytes((SOURCE / "run.json").read_bytes())
    engine_core, *workers = sorted((SOURCE / "events").glob("*.jsonl"))
    (folder / "events" / engine_core.name).write_bytes(engine_core.read_bytes())
    texts = [path.read_text().splitlines() for path in workers]
    for rank in range(ranks):
        more = 2048 * _MIB if rank == outlier else rank * 37 % 61 * _MIB
        lines = [
            json.dumps(_as_rank(json.loads(line), rank, ranks, more))
            for line in texts[rank % len(texts)]
        ]
        (folder / "events" / f"node0-{50000 + rank}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_many_hosts(folder: Path, hosts: int, ranks: int) -> Path:
    """Writes a run folder per host, each an engine core of ``ranks``; one rank has 2 GiB more.

    The monotonic clocks of the hosts are far apart, and all ranks are one world.

    Returns:
        The folder that holds them.
    """
    for number in range(hosts):
        host = f"node{number:02}"
        run = write_many_ranks(folder / host, ranks, outlier=3 if number == hosts // 2 else None)
        info = json.loads((run / "run.json").read_text())
        place = {"deployment": "many", "source": "option", "headless": number > 0}
        place |= {"dp_size": hosts, "dp_start": number, "dp_local": 1, "world_size": ranks}
        info |= {"id": host, "host": host, "part": place}
        (run / "run.json").write_text(json.dumps(info))
        for path in (run / "events").iterdir():
            events = [json.loads(line) for line in path.read_text().splitlines()]
            for event in events:
                _on_host(event, host, number, hosts * ranks)
            path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return folder


def _on_host(event: dict, host: str, number: int, world: int) -> None:
    event["t_ns"] += number * 10**12
    taken = event.get("snapshot") or {}
    if taken.get("t_ns") is not None:
        taken["t_ns"] += number * 10**12
    if event["kind"] == "process":
        event["host"] = host
    elif event["kind"] == "identity":
        event.update(dp_rank=number, label=f"DP{number} {event['label']}")
    elif event.get("phase") == "communicator" and event.get("detail"):
        event["detail"]["ranks"] = list(range(world))


def _as_rank(event: dict, rank: int, ranks: int, more: int) -> dict:
    if event["kind"] == "process":
        event["pid"] = 50000 + rank
    elif event["kind"] == "identity":
        event.update(
            rank=rank, tp_rank=rank, local_rank=rank % 8, label=f"TP{rank}", world_size=ranks
        )
    taken = event.get("snapshot") or {}
    for name, sign in _OUTSIDE_TORCH.items():
        if taken.get(name) is not None:
            taken[name] += sign * more
    figures = event.get("values") or {}
    for name, sign in _FIGURES_OUTSIDE_TORCH.items():
        if figures.get(name) is not None:
            figures[name] += sign * more
    return event
