"""Metrics of a process, for Prometheus: what is counted where it happens, and what is read when somebody asks.

Each service declares its own in one module `metrics`, with `counter`, `histogram`, `gauge` and `total`; `families()`
knows them all. A name begins with `penstock_`, ends with its unit, and a counter's with `_total`. Labels are of few
values: methods, states, backends, closed vocabularies; never an id, a name that a caller chose, or a secret (R8).

Counting costs about a microsecond and is always on; whether anybody can read it is `exposition`'s matter. Gauges cost
nothing until they are read. They are read on the event loop, whose state they tell.
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
"""By the labels' values, in the order of the labels."""
Reader: TypeAlias = Callable[[], Values | float]
"""Tells what a metric is now: one number where it has no labels."""

REGISTRY: Final = CollectorRegistry()
"""This process's own: what other libraries count elsewhere is not told."""

SHORT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
LONG_S: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)

_log = structlog.get_logger(__name__)

# When a series began is told by Prometheus's own scrapes; a second series for each would only say it again.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
ProcessCollector(registry=REGISTRY)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as it was declared."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str


_families: dict[str, Family] = {}
_reads: list[Read] = []


def families() -> tuple[Family, ...]:
    """What the modules that are loaded have declared, in order."""
    return tuple(_families.values())


def counter(name: str, text: str, *labels: str) -> Counter:
    """What only grows, counted where it happens."""
    _declare(name, "counter", labels, text)
    return Counter(name.removesuffix("_total"), text, labels, registry=REGISTRY)


def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = LONG_S) -> Histogram:
    """How often, and how large: with the count and the sum of what was observed."""
    _declare(name, "histogram", labels, text)
    return Histogram(name, text, labels, registry=REGISTRY, buckets=buckets)


def gauge(name: str, text: str, *labels: str) -> Read:
    """What goes up and down, read when somebody asks."""
    return Read(_declare(name, "gauge", labels, text))


def total(name: str, text: str, *labels: str) -> Read:
    """What only grows and is counted elsewhere already, read when somebody asks."""
    return Read(_declare(name, "counter", labels, text))


class Read(Collector):
    """A metric whose values are asked for; it has none while nobody tells them."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._readers: list[Reader] = []
        _reads.append(self)
        REGISTRY.register(self)

    @contextmanager
    def told_by(self, reader: Reader) -> Iterator[None]:
        """Inside, `reader` tells the values."""
        self._readers.append(reader)
        try:
            yield
        finally:
            self._readers.remove(reader)

    def values(self) -> dict[tuple[str, ...], float]:
        """What is told now."""
        found: dict[tuple[str, ...], float] = {}
        for reader in self._readers:
            try:
                told = reader()
                found.update(told if isinstance(told, Mapping) else {(): told})
            except Exception:  # noqa: BLE001 - one that cannot be read must not hide all others
                _log.warning("a metric could not be read", metric=self.family.name, exc_info=True)
        return found

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family, text, labels = self.family.name, self.family.text, self.family.labels
        told: CounterMetricFamily | GaugeMetricFamily
        if self.family.kind == "counter":
            told = CounterMetricFamily(family.removesuffix("_total"), text, labels=labels)
        else:
            told = GaugeMetricFamily(family, text, labels=labels)
        for values, value in self.values().items():
            told.add_metric(values, value)
        yield told

    def describe(self) -> list[Metric]:
        """For the registry: what it would be, without reading anything."""
        return []


def gauges() -> Iterator[tuple[Family, Values]]:
    """Every gauge with its values now."""
    for read in _reads:
        if read.family.kind == "gauge":
            yield read.family, read.values()


def exposed(accept: str = "") -> tuple[bytes, str]:
    """All metrics as text, and its content type, in the form that `accept` asks for."""
    encode, content_type = prometheus_client.exposition.choose_encoder(accept)
    return encode(REGISTRY), content_type


def _declare(name: str, kind: Kind, labels: tuple[str, ...], text: str) -> Family:
    family = _families[name] = Family(name, kind, labels, text)
    return family
