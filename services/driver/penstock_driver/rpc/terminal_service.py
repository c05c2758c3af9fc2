"""TerminalService: declared in the contract, not served by this version, which says so by UNIMPLEMENTED."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from penstock.driver.v1 import terminal_service_pb2, terminal_service_pb2_grpc
from penstock_chassis.errors import Unsupported


class TerminalServicer(terminal_service_pb2_grpc.TerminalServiceServicer):
    """Refuses every method, so that nothing is started (see terminal_service.proto)."""

    async def OpenTerminal(  # noqa: N802
        self, request: terminal_service_pb2.OpenTerminalRequest, context: Any
    ) -> terminal_service_pb2.OpenTerminalResponse:
        """UNIMPLEMENTED."""
        raise _unsupported()

    async def Step(  # type: ignore[override] # noqa: N802 - grpc.aio also takes a coroutine for a stream
        self, request_iterator: AsyncIterator[terminal_service_pb2.StepRequest], context: Any
    ) -> None:
        """UNIMPLEMENTED."""
        raise _unsupported()

    async def CloseTerminal(  # noqa: N802
        self, request: terminal_service_pb2.CloseTerminalRequest, context: Any
    ) -> terminal_service_pb2.CloseTerminalResponse:
        """UNIMPLEMENTED."""
        raise _unsupported()

    async def GetTerminal(  # noqa: N802
        self, request: terminal_service_pb2.GetTerminalRequest, context: Any
    ) -> terminal_service_pb2.GetTerminalResponse:
        """UNIMPLEMENTED."""
        raise _unsupported()


def _unsupported() -> Unsupported:
    return Unsupported("this version of the driver serves no terminal episodes", reason="TERMINALS_UNSUPPORTED")
