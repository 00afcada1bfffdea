"""Figures of a run as Prometheus text, over HTTP, from the launcher's process.

The state of the run enters at each turn of the launcher's loop; a scrape gets the last one. Engine
processes have no part in it. What is unknown has no sample, never a 0. Labels are names of ranks
and of owners: no model, path, prompt or argument enters here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.files import read_own
from vllm_memprof.launch.live import View
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.version import pip_install

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily

#: Kind of a metric -> names of its labels.
LABELS = {"run": (), "counter": (), "rank": ("rank",), "owner": ("rank", "owner")}
#: Characters of a label value; others are replaced.
_NOT_A_LABEL = re.compile(r"[^A-Za-z0-9 _.:-]")
_MOST_LABEL = 60
#: Label values -> the values of its metrics by name, where they are known.
_Figures = Mapping[tuple[str, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Metric:
    """One metric."""

    key: str  # of its value
    help: str
    kind: str  # of LABELS

    @property
    def name(self) -> str:
        """Return the name of its series, as a query has to spell it."""
        return f"memprof_{self.key}{'_total' if self.kind == 'counter' else ''}"


METRICS = [
    Metric(key, text, kind)
    for kind, rows in read_own(__file__, "metrics.toml").items()
    for key, text in rows.items()
]


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
                pip_install("prometheus_client"),
            ) from error
        self._figures: dict[str, _Figures] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"--metrics-port {port}: cannot listen on {host}: {reason}",
                "another --metrics-port; 0 takes a free one",
            ) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def update(self, progress: EngineProgress) -> None:
        load = progress.serving
        run: dict[str, Any] = {
            "simulated": int(self._modelled),
            "growth_judged": int(progress.growth_judged),
            "samples": sum(process.samples for process in progress.processes),
            "events_lost": sum(process.lost_events for process in progress.processes),
        }
        if load is not None:
            age_s = (time.monotonic_ns() - load.t_ns) / 1e9
            run |= {**vars(load), "last_sample_timestamp_seconds": time.time() - age_s}
        ranks: dict[tuple[str, ...], dict[str, Any]] = {}
        owners: dict[tuple[str, ...], dict[str, Any]] = {}
        names = [process.budget.label if process.budget else process.name
                 for process in progress.workers]  # fmt: skip
        for name, process in zip(names, progress.workers, strict=True):
            # replicas may call their ranks the same
            label = clean_label(name if names.count(name) == 1 else f"{name} pid {process.pid}")
            ranks[label,] = {
                **process.readings,
                "allocated_peak_bytes": process.readings.get("allocated_run_peak_bytes"),
            }
            if process.budget is None:
                continue
            ranks[label,] |= {**vars(process.budget), "headroom_bytes": process.headroom_bytes}
            for owner, size in sorted(process.budget.owners.items()):
                owners[label, clean_label(owner)] = {"owner_bytes": size}
            for owner, size in sorted(process.budget.host.items()):
                owners[label, clean_label(owner)] = {"host_owner_bytes": size}
            for each in process.budget.growth or ():
                owners.setdefault((label, clean_label(each.owner)), {}).update(
                    growth_bytes_per_hour=each.bytes_per_hour,
                    growth_hours_until_full=each.hours_until_full,
                )
        self._figures = {"run": {(): run}, "counter": {(): run}, "rank": ranks, "owner": owners}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)

    def collect(self) -> Iterator[Family]:
        """Yield the families of one scrape; prometheus_client calls it from the server's thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._figures
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(f"memprof_{metric.key}", metric.help, labels=LABELS[metric.kind])
            for labels, values in figures.get(metric.kind, {}).items():
                if (value := values.get(metric.key)) is not None:
                    family.add_metric(labels, value)
            yield family


def clean_label(text: str) -> str:
    """Return a label value of plain characters, at most 60."""
    return _NOT_A_LABEL.sub("_", text)[:_MOST_LABEL]
