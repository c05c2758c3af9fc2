"""Metrics of a process, for Prometheus: counters updated as events happen, gauges read on demand.

Each service declares its own in one module `metrics`, with `counter`, `histogram`, `gauge` and `total`; `families()`
returns them all. A name begins with `penstock_` and ends with its unit, a counter's with `_total`. Labels have few
values: methods, states, backends, closed vocabularies; never an id, a name that a caller chose, or a secret (R8).

Counting costs about a microsecond and is always on; `exposition` decides whether it can be read. Gauges cost nothing
until they are read. They are read on the event loop, whose state they report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Values: TypeAlias = Mapping[tuple[str, ...], float]
"""Values by label values, in the order of the labels."""
Reader: TypeAlias = Callable[[], Values | float]
"""Returns a metric's current values: one number where it has no labels."""

REGISTRY: Final = CollectorRegistry()
"""This process's own registry: other libraries' metrics are not exposed."""

SHORT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
LONG_S: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)

_log = structlog.get_logger(__name__)

# No `_created` series: Prometheus's own scrapes show when a series began.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
ProcessCollector(registry=REGISTRY)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as declared."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str


_families: dict[str, Family] = {}
_reads: list[Read] = []


def families() -> tuple[Family, ...]:
    """Returns the declarations of all loaded modules, in order."""
    return tuple(_families.values())


def counter(name: str, text: str, *labels: str) -> Counter:
    """Declares a counter that is incremented where the event happens."""
    _declare(name, "counter", labels, text)
    return Counter(name.removesuffix("_total"), text, labels, registry=REGISTRY)


def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = LONG_S) -> Histogram:
    """Declares a histogram, with count and sum of the observations."""
    _declare(name, "histogram", labels, text)
    return Histogram(name, text, labels, registry=REGISTRY, buckets=buckets)


def gauge(name: str, text: str, *labels: str) -> Read:
    """Declares a gauge, read on demand."""
    return Read(_declare(name, "gauge", labels, text))


def total(name: str, text: str, *labels: str) -> Read:
    """Declares a counter that is kept elsewhere and read on demand."""
    return Read(_declare(name, "counter", labels, text))


class Read(Collector):
    """A metric read from a reader; it has no values while no reader is set."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._readers: list[Reader] = []
        _reads.append(self)
        REGISTRY.register(self)

    @contextmanager
    def supplied_by(self, reader: Reader) -> Iterator[None]:
        """While the context is open, `reader` supplies this metric's values."""
        self._readers.append(reader)
        try:
            yield
        finally:
            self._readers.remove(reader)

    def values(self) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for reader in self._readers:
            try:
                supplied = reader()
                found.update(supplied if isinstance(supplied, Mapping) else {(): supplied})
            except Exception:  # noqa: BLE001 - one that cannot be read must not hide all others
                _log.warning("a metric could not be read", metric=self.family.name, exc_info=True)
        return found

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        family, text, labels = self.family.name, self.family.text, self.family.labels
        metric: CounterMetricFamily | GaugeMetricFamily
        if self.family.kind == "counter":
            metric = CounterMetricFamily(family.removesuffix("_total"), text, labels=labels)
        else:
            metric = GaugeMetricFamily(family, text, labels=labels)
        for values, value in self.values().items():
            metric.add_metric(values, value)
        yield metric

    def describe(self) -> list[Metric]:
        """Called by the registry: the metric's declaration, without reading values."""
        return []


def gauges() -> Iterator[tuple[Family, Values]]:
    """Yields every gauge with its current values."""
    for read in _reads:
        if read.family.kind == "gauge":
            yield read.family, read.values()


def exposed(accept: str = "") -> tuple[bytes, str]:
    """Returns all metrics as text, and its content type, in the format that `accept` requests."""
    encode, content_type = prometheus_client.exposition.choose_encoder(accept)
    return encode(REGISTRY), content_type


def _declare(name: str, kind: Kind, labels: tuple[str, ...], text: str) -> Family:
    family = _families[name] = Family(name, kind, labels, text)
    return family
