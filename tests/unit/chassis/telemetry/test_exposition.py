"""The port of the metrics: TLS where the service has it, a token always, and nothing else on it."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.commands.credentials import make
from penstock_chassis.auth import Authenticator, Role
from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_chassis.settings import ServiceSettings
from penstock_chassis.telemetry import metrics
from penstock_chassis.telemetry.exposition import exposition
from penstock_chassis.tls import ServerTls

WHO = Authenticator({Role.OBSERVER: "an-observer"})
TEMPERATURE = metrics.gauge("chassis_test_degrees", "A test's", "room")
STEPS = metrics.total("chassis_test_steps_total", "A test's")


async def test_gauges_are_read_on_request_and_a_broken_one_hides_no_other() -> None:
    """Gauges cost nothing until somebody looks."""
    seen: list[str] = []

    def broken() -> float:
        raise RuntimeError("not now")

    def degrees() -> dict[tuple[str, ...], float]:
        seen.append("asked")
        return {("kitchen",): 21.5}

    with TEMPERATURE.supplied_by(degrees), STEPS.supplied_by(broken):
        assert not seen
        async with exposition("127.0.0.1", 0, WHO) as address, aiohttp.ClientSession() as http:
            asked = http.get(f"http://{address}/metrics", headers={"Authorization": "Bearer an-observer"})
            async with asked as answer:
                text = await answer.text()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    (sample,) = found["chassis_test_degrees"].samples
    assert (sample.labels, sample.value) == ({"room": "kitchen"}, 21.5)
    assert found["chassis_test_steps"].samples == [] and "process_open_fds" in found


@pytest.mark.requirement("R5")
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer nobody"}, {"Authorization": "an-observer"}])
async def test_metrics_are_hidden_without_a_token(headers: dict[str, str]) -> None:
    """What is not a request for the metrics is not there, and a request without a token is refused."""
    async with exposition("127.0.0.1", 0, WHO) as address, aiohttp.ClientSession(headers=headers) as http:
        async with http.get(f"http://{address}/metrics") as answer:
            assert answer.status == 401 and "penstock_" not in await answer.text()
        async with http.get(f"http://{address}/") as answer:
            assert answer.status == 404


@pytest.mark.requirement("R9")
async def test_metrics_are_served_over_tls(tmp_path: Path) -> None:
    """What leaves the machine does not leave it in clear."""
    make(tmp_path / "c", (), 1)
    tls = ServerTls(tmp_path / "c/driver.pem", tmp_path / "c/driver.key")
    trust = ssl.create_default_context(cafile=str(tmp_path / "c/ca.pem"))
    async with exposition("127.0.0.1", 0, WHO, tls) as address, aiohttp.ClientSession() as http:
        asked = http.get(f"https://{address}/metrics", headers={"Authorization": "Bearer an-observer"}, ssl=trust)
        async with asked as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://{address}/metrics")


async def test_taken_port_is_reported() -> None:
    """With what to do."""
    async with exposition("127.0.0.1", 0, WHO) as address:
        with pytest.raises(FailedPrecondition, match="metrics_port") as refused:
            async with exposition("127.0.0.1", int(address.rpartition(":")[2]), WHO):
                pass
    assert refused.value.reason == "PORT_IN_USE"


@pytest.mark.requirement("R9")
def test_metrics_on_a_wide_address_need_what_the_service_itself_would() -> None:
    """TLS and a token."""
    with pytest.raises(ValueError, match="metrics_host"):
        ServiceSettings(operator_token="t", metrics_host="0.0.0.0", metrics_port=1)
    with pytest.raises(InvalidArgument):
        ServiceSettings.load(["--otlp-endpoint", "not a URL"])
