"""A channel whose calls carry the headers that route them (`penstock.values.routes`)."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import grpc

from penstock.values import routes


class RoutedChannel:
    """Wraps a channel: what generated stubs need of it.

    An interceptor of grpc.aio would replace each stream by a proxy that copies its messages.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.inner = channel
        """The channel itself."""

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> "RoutedMethod":
        return RoutedMethod("unary_unary", method, self.inner, args, kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> "RoutedMethod":
        return RoutedMethod("unary_stream", method, self.inner, args, kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> "RoutedMethod":
        return RoutedMethod("stream_unary", method, self.inner, args, kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> "RoutedMethod":
        return RoutedMethod("stream_stream", method, self.inner, args, kwargs)

    async def close(self) -> None:
        await self.inner.close()


class RoutedMethod:
    """A method of a stub. `routed` is the request that decides the headers, where the call does not begin with it."""

    def __init__(self, kind: str, method: str, channel: grpc.aio.Channel, args: Any, kwargs: Any) -> None:
        self._kind, self._method, self._args, self._kwargs = kind, method, args, kwargs
        self._call = getattr(channel, kind)(method, *args, **kwargs)

    def at(self, channel: RoutedChannel) -> "RoutedMethod":
        """Returns the same method of another channel."""
        return RoutedMethod(self._kind, self._method, channel.inner, self._args, self._kwargs)

    def __call__(self, request: Any = None, *, metadata: Any = None, routed: Any = None, **kwargs: Any) -> Any:
        if routes.declared(self._method):
            first = request if routed is None else routed
            if isinstance(request, Iterator) and routed is None and (first := next(request, None)) is not None:
                request = chain((first,), request)
            headers = routes.headers(self._method, first)
            names = {name for name, _ in headers}
            metadata = (*(item for item in metadata or () if item[0] not in names), *headers)
        return self._call(*(() if request is None else (request,)), metadata=metadata, **kwargs)
