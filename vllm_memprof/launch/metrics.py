"""Figures of a run as Prometheus text, over HTTP, from the launcher's process.

The status of the run enters at each turn of the launcher's loop; a scrape gets the last one. Engine
processes have no part in it. What is unknown has no sample, never a 0. Labels are names of ranks
and of owners: no model, path, prompt or argument enters here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.launch.live import View
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.launch.status import RankBudget, RankStatus, Status, read_status

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily

GAUGE, COUNTER = "gauge", "counter"
#: Label values, then the value; None is left out.
Sample = tuple[tuple[str, ...], "int | float | None"]
#: Characters of a label value; others are replaced.
_NOT_A_LABEL = re.compile(r"[^A-Za-z0-9 _.:-]")
_MOST_LABEL = 60


@dataclass(frozen=True)
class Metric:
    """One metric: its name, and where its samples come from."""

    name: str  # counters without their _total
    help: str
    read: Callable[[Status], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    kind: str = GAUGE


def _of_rank(name: str, help_text: str, read: Callable[[RankStatus], int | None]) -> Metric:
    def samples(status: Status) -> Iterator[Sample]:
        for label, rank in _labelled(status.ranks):
            yield (label,), read(rank)

    return Metric(f"memprof_{name}", help_text, samples, ("rank",))


def _reading(help_text: str, field_name: str, name: str | None = None) -> Metric:
    return _of_rank(name or field_name, help_text, lambda rank: rank.reading(field_name))


def _budget(help_text: str, field_name: str) -> Metric:
    return _of_rank(
        f"kv_cache_{field_name}",
        help_text,
        lambda rank: None if rank.budget is None else getattr(rank.budget, field_name),
    )


def _of_owners(
    name: str, help_text: str, read: Callable[[RankBudget], Iterable[tuple[str, float | None]]]
) -> Metric:
    def samples(status: Status) -> Iterator[Sample]:
        for label, rank in _labelled(status.ranks):
            for owner, value in () if rank.budget is None else read(rank.budget):
                yield (label, owner), value

    return Metric(f"memprof_{name}", help_text, samples, ("rank", "owner"))


def _growth(help_text: str, field_name: str) -> Metric:
    return _of_owners(
        f"growth_{field_name}",
        help_text,
        lambda budget: [(each.owner, getattr(each, field_name)) for each in budget.growth or ()],
    )


def _of_run(
    name: str, help_text: str, read: Callable[[Status], float | None], kind: str = GAUGE
) -> Metric:
    return Metric(f"memprof_{name}", help_text, lambda status: [((), read(status))], kind=kind)


def _serving(name: str, help_text: str, field_name: str) -> Metric:
    return _of_run(name, help_text, lambda status: getattr(status.serving, field_name, None))


METRICS = (
    _of_run(
        "simulated",
        "1: a simulated device, whose profile sets memory outside torch; 0: hardware",
        lambda status: int(status.modelled),
    ),
    _reading("Memory of the device, at the last reading", "device_total_bytes"),
    _reading(
        "Free memory of the device, all processes count, at the last reading", "device_free_bytes"
    ),
    _reading("Blocks handed to live tensors, at the last reading", "allocated_bytes"),
    _reading(
        "Most that was allocated since the process began, at the last reading",
        "allocated_run_peak_bytes",
        "allocated_peak_bytes",
    ),
    _reading("Segments that the caching allocator holds, at the last reading", "reserved_bytes"),
    _reading(
        "Device used less reserved, all processes count, at the last reading", "non_torch_bytes"
    ),
    _reading("Resident memory of the worker on the host, at the last reading", "host_rss_bytes"),
    _of_owners(
        "owner_bytes",
        "The device by owner at the last phase edge; owners add up to its total",
        lambda budget: sorted(budget.owners.items()),
    ),
    _of_rank(
        "kv_cache_granted_bytes",
        "KV cache granted by the engine",
        lambda rank: rank.granted_bytes,
    ),
    _budget(
        "KV cache with which held memory stays within utilization x total", "fits_request_bytes"
    ),
    _budget(
        "KV cache with which held memory stays within the device at the serving peak",
        "fits_device_bytes",
    ),
    _of_rank(
        "headroom_bytes",
        "Device total less all that is held at the serving peak, or the least sampled free memory",
        lambda rank: rank.headroom_bytes,
    ),
    _of_run(
        "growth_judged",
        "1: the samples of every rank are enough to tell which owners grow; 0: not yet",
        lambda status: int(status.growth_judged),
    ),
    _growth(
        "Growth of an owner beyond noise while serving; owners that do not grow have no sample",
        "bytes_per_hour",
    ),
    _growth(
        "Hours until the device is full at the rate of an owner that grows", "hours_until_full"
    ),
    _serving(
        "kv_cache_used_bytes",
        "KV cache in use on the worker that holds the most, at the last sample",
        "kv_used_bytes",
    ),
    _serving("kv_blocks_used", "Blocks of the KV cache in use, at the last sample", "blocks_used"),
    _serving("kv_blocks", "Blocks of the KV cache, at the last sample", "blocks"),
    _serving(
        "requests_running", "Requests running at the last sample, 0 once all have ended", "running"
    ),
    _serving(
        "requests_waiting", "Requests waiting at the last sample, 0 once all have ended", "waiting"
    ),
    _of_run(
        "last_sample_timestamp_seconds",
        "When the engine core was last sampled, seconds since the epoch",
        lambda status: (
            None
            if status.serving is None
            else time.time() - (time.monotonic_ns() - status.serving.t_ns) / 1e9
        ),
    ),
    _of_run("samples", "Samples read, of all processes", lambda status: status.samples, COUNTER),
    _of_run(
        "events_lost",
        "Events that processes could not write, known once they can again",
        lambda status: status.lost_events,
        COUNTER,
    ),
)


def exported_names() -> list[str]:
    """Return the names of all series, as a query has to spell them."""
    return [f"{each.name}_total" if each.kind == COUNTER else each.name for each in METRICS]


class Exporter(View):
    """Serves the metrics of one run until it is closed.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        modelled: the device is simulated.

    Raises:
        MemprofError: prometheus_client is not installed.
        UsageError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, modelled: bool = False) -> None:
        self._modelled = modelled
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise MemprofError(
                "--metrics-port needs prometheus_client, which is not installed",
                hint="pip install 'vllm-memprof[metrics]'",
            ) from error
        self._status: Status | None = None
        self._budgets: list[RankBudget] = []
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"--metrics-port {port}: cannot listen on {host}: {reason}",
                hint="another --metrics-port; 0 takes a free one",
            ) from error
        self.port = int(self._server.server_port)
        self.url = f"http://{host}:{self.port}/metrics"

    def update(self, progress: EngineProgress, last_line: str = "") -> None:
        self._status = read_status(progress, self._budgets, self._modelled)

    def serve(self, budgets: Iterable[RankBudget]) -> None:
        self._budgets = list(budgets)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)

    def describe(self) -> Iterator[Family]:
        """Yield the families without samples; of prometheus_client."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Yield the families of one scrape; prometheus_client calls it from the server's thread."""
        status = self._status
        for metric in METRICS:
            family = _family(metric)
            for labels, value in () if status is None else metric.read(status):
                if value is not None:
                    family.add_metric([clean_label(label) for label in labels], value)
            yield family


def _family(metric: Metric) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)


def _labelled(ranks: list[RankStatus]) -> Iterator[tuple[str, RankStatus]]:
    """Yield each rank with a label that no other has: replicas may call their ranks the same."""
    labels = [rank.budget.label if rank.budget is not None else rank.label for rank in ranks]
    for label, rank in zip(labels, ranks, strict=True):
        yield (label if labels.count(label) == 1 else f"{label} pid {rank.process.pid}"), rank


def clean_label(text: str) -> str:
    """Return a label value of plain characters, at most 60."""
    return _NOT_A_LABEL.sub("_", text)[:_MOST_LABEL]
