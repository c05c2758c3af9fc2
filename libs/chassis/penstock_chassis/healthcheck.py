"""Asks a service whether it serves: what a container's health check runs.

`python -m penstock_chassis.healthcheck localhost:7701` ends with 0 when `grpc.health.v1.Health/Check` says SERVING,
and otherwise with 1 and the reason. With `PENSTOCK_CA_FILE` it speaks TLS and verifies the server by that PEM file. It
needs no token, and has none.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_chassis.errors import InvalidArgument
from penstock_chassis.tls import ClientTls

CA_VARIABLE: Final = "PENSTOCK_CA_FILE"
"""Environment variable that names the CA's PEM file; clients use the same."""


def main(argv: Sequence[str] | None = None) -> int:
    """Checks once; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock_chassis.healthcheck", description=__doc__)
    parser.add_argument("address", help="host:port of the service")
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds to wait; default %(default)s")
    given = parser.parse_args(argv)
    problem = check(given.address, os.environ.get(CA_VARIABLE), given.timeout)
    if problem:
        sys.stderr.write(f"{given.address}: {problem}\n")
    return 1 if problem else 0


def check(address: str, ca: str | None, timeout: float) -> str:
    """Returns why the service does not serve; empty when it does."""
    try:
        channel = (
            grpc.secure_channel(address, ClientTls(Path(ca)).credentials()) if ca else grpc.insecure_channel(address)
        )
    except InvalidArgument as error:
        return error.message
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    sys.exit(main())
