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
from vllm_memprof.launch.live import SilentView
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

    return Metric(name, help_text, samples, ("rank",))


def _reading(field_name: str) -> Callable[[RankStatus], int | None]:
    return lambda rank: rank.reading(field_name)


def _budget(field_name: str) -> Callable[[RankStatus], int | None]:
    return lambda rank: None if rank.budget is None else getattr(rank.budget, field_name)


def _serving(field_name: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        if status.serving is not None:
            yield (), getattr(status.serving, field_name)

    return samples


def _owners(status: Status) -> Iterator[Sample]:
    for label, rank in _labelled(status.ranks):
        for owner, size in sorted({} if rank.budget is None else rank.budget.owners.items()):
            yield (label, owner), size


def _growth(field_name: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        for label, rank in _labelled(status.ranks):
            for each in () if rank.budget is None else rank.budget.growth or ():
                yield (label, each.owner), getattr(each, field_name)

    return samples


def _last_sample(status: Status) -> Iterator[Sample]:
    if status.serving is not None:
        yield (), time.time() - (time.monotonic_ns() - status.serving.t_ns) / 1e9


METRICS = (
    Metric(
        "memprof_simulated",
        "1: a simulated device, whose profile sets memory outside torch; 0: hardware",
        lambda status: [((), int(status.modelled))],
    ),
    _of_rank(
        "memprof_device_total_bytes",
        "Memory of the device, at the last reading",
        _reading("device_total_bytes"),
    ),
    _of_rank(
        "memprof_device_free_bytes",
        "Free memory of the device, all processes count, at the last reading",
        _reading("device_free_bytes"),
    ),
    _of_rank(
        "memprof_allocated_bytes",
        "Blocks handed to live tensors, at the last reading",
        _reading("allocated_bytes"),
    ),
    _of_rank(
        "memprof_allocated_peak_bytes",
        "Most that was allocated since the process began, at the last reading",
        _reading("allocated_run_peak_bytes"),
    ),
    _of_rank(
        "memprof_reserved_bytes",
        "Segments that the caching allocator holds, at the last reading",
        _reading("reserved_bytes"),
    ),
    _of_rank(
        "memprof_non_torch_bytes",
        "Device used less reserved, all processes count, at the last reading",
        _reading("non_torch_bytes"),
    ),
    _of_rank(
        "memprof_host_rss_bytes",
        "Resident memory of the worker on the host, at the last reading",
        _reading("host_rss_bytes"),
    ),
    Metric(
        "memprof_owner_bytes",
        "The device by owner at the last phase edge; owners add up to its total",
        _owners,
        ("rank", "owner"),
    ),
    _of_rank(
        "memprof_kv_cache_granted_bytes",
        "KV cache granted by the engine",
        lambda rank: rank.granted_bytes,
    ),
    _of_rank(
        "memprof_kv_cache_fits_request_bytes",
        "KV cache with which held memory stays within utilization x total",
        _budget("fits_request_bytes"),
    ),
    _of_rank(
        "memprof_kv_cache_fits_device_bytes",
        "KV cache with which held memory stays within the device at the serving peak",
        _budget("fits_device_bytes"),
    ),
    _of_rank(
        "memprof_spare_bytes",
        "Device total less all that is held at the serving peak, or the least sampled free memory",
        lambda rank: rank.spare_bytes,
    ),
    Metric(
        "memprof_growth_judged",
        "1: the samples of every rank are enough to tell which owners grow; 0: not yet",
        lambda status: [((), int(status.growth_judged))],
    ),
    Metric(
        "memprof_growth_bytes_per_hour",
        "Growth of an owner beyond noise while serving; owners that do not grow have no sample",
        _growth("bytes_per_hour"),
        ("rank", "owner"),
    ),
    Metric(
        "memprof_growth_hours_until_full",
        "Hours until the device is full at the rate of an owner that grows",
        _growth("hours_until_full"),
        ("rank", "owner"),
    ),
    Metric(
        "memprof_kv_cache_used_bytes",
        "KV cache in use on the worker that holds the most, at the last sample",
        _serving("kv_used_bytes"),
    ),
    Metric(
        "memprof_kv_blocks_used",
        "Blocks of the KV cache in use, at the last sample",
        _serving("blocks_used"),
    ),
    Metric("memprof_kv_blocks", "Blocks of the KV cache, at the last sample", _serving("blocks")),
    Metric(
        "memprof_requests_running",
        "Requests running at the last sample, 0 once all have ended",
        _serving("running"),
    ),
    Metric(
        "memprof_requests_waiting",
        "Requests waiting at the last sample, 0 once all have ended",
        _serving("waiting"),
    ),
    Metric(
        "memprof_last_sample_timestamp_seconds",
        "When the engine core was last sampled, seconds since the epoch",
        _last_sample,
    ),
    Metric(
        "memprof_samples",
        "Samples read, of all processes",
        lambda status: [((), status.samples)],
        kind=COUNTER,
    ),
    Metric(
        "memprof_events_lost",
        "Events that processes could not write, known once they can again",
        lambda status: [((), status.lost_events)],
        kind=COUNTER,
    ),
)


def exported_names() -> list[str]:
    """Return the names of all series, as a query has to spell them."""
    return [f"{each.name}_total" if each.kind == COUNTER else each.name for each in METRICS]


class Exporter(SilentView):
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
        registry.register(_Collector(lambda: self._status))
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


class _Collector:
    """Makes the families of one scrape; prometheus_client calls it from the server's thread."""

    def __init__(self, latest: Callable[[], Status | None]) -> None:
        self._latest = latest

    def describe(self) -> Iterator[Family]:
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        status = self._latest()
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
