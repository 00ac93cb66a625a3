"""The gRPC server of the picker: one method for requests, two for its health."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from router.ext_proc.messages import HealthCheckRequest, HealthCheckResponse
from router.ext_proc.stream import BrokenMessageError, GatewayStream, Surroundings
from router.services import logger

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH: Final = "grpc.health.v1.Health"
_ENVELOPE_BYTES: Final = 1 << 20  # of a message, beside the body in it
_LOOK_AGAIN_S: Final = 1.0
_PING_MS: Final = 30_000  # else the machine of a gateway could be gone for two hours unnoticed
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM; with ``client_ca`` gateways need a certificate, too."""

    chain: bytes
    private_key: bytes
    client_ca: bytes | None = None


class PickerServer:
    """Serves streams of gateways; ``why_not_ready`` says why none can be picked for now, or None."""

    def __init__(
        self,
        around: Surroundings,
        why_not_ready: Callable[[], str | None],
        *,
        host: str,
        port: int,
        certificate: Certificate | None = None,
    ) -> None:
        """``port`` 0 takes a free one."""
        self._around = around
        self._why_not_ready = why_not_ready
        self._host = host
        self.port = port
        self._certificate = certificate
        self._server: Any = None
        self._streams: dict[GatewayStream, asyncio.Task[Any]] = {}
        self._stopping = False

    async def start(self) -> None:
        """Raises OSError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        socket.create_server(
            (self._host, self.port), family=family
        ).close()  # gRPC does not say what is wrong
        limit = self._around.services.settings.max_body_bytes + _ENVELOPE_BYTES
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", _PING_MS),
                ("grpc.keepalive_timeout_ms", _PING_MS // 3),
                ("grpc.http2.ping_timeout_ms", _PING_MS // 3),
                ("grpc.http2.max_pings_without_data", 0),
            )
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE, {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
                ),
                grpc.method_handlers_generic_handler(
                    _HEALTH,
                    {
                        "Check": grpc.unary_unary_rpc_method_handler(self._check),
                        "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
                    },
                ),
            )
        )
        address = f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"
        if self._certificate is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, _credentials(self._certificate))
        await server.start()
        self._server = server

    async def stop(self, grace_s: float) -> None:
        """Requests that are being picked for may finish; streams that only wait for responses end well.

        A gateway goes on with a request whose stream ended well, and may break off one whose stream did not.
        """
        if self._server is None:
            return
        self._stopping = True
        stopping = asyncio.ensure_future(self._server.stop(grace_s))
        await asyncio.sleep(0)
        while self._streams and not stopping.done():
            for stream, task in self._streams.items():
                if stream.answered:
                    task.cancel()
            await asyncio.wait((stopping,), timeout=_LOOK_AGAIN_S / 20)
        await stopping

    async def _process(self, _: Any, context: Any) -> None:
        stream = GatewayStream(self._around)
        half_closed = False
        task = asyncio.current_task()
        assert task is not None
        self._streams[stream] = task
        try:
            while (raw := await context.read()) is not grpc.aio.EOF:
                for answer in await stream.receive(raw):
                    await context.write(answer)
            half_closed = True
        except BrokenMessageError as error:
            self._around.services.picks.broken_messages += 1
            logger.warning("a gateway's message was not understood", error=str(error), peer=context.peer())
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            del self._streams[stream]
            if half_closed:
                stream.ended()
            else:
                stream.broken_off()

    async def _check(self, raw: bytes, context: Any) -> bytes:
        status = self._status(await _service(raw, context))
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return bytes(HealthCheckResponse(status=status).SerializeToString())

    async def _watch(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        name = await _service(raw, context)
        told = None
        while True:
            status = self._status(name)
            if status != told:
                told = status
                yield bytes(HealthCheckResponse(status=status).SerializeToString())
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _status(self, service: str) -> int:
        if service == "liveness":
            return _SERVING
        if service in ("", "readiness", SERVICE):
            return _SERVING if self._why_not_ready() is None else _NOT_SERVING
        return _UNKNOWN


async def _service(raw: bytes, context: Any) -> str:
    try:
        return str(HealthCheckRequest.FromString(raw).service)
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no HealthCheckRequest: {error}")
        raise


def _credentials(certificate: Certificate) -> Any:
    return grpc.ssl_server_credentials(
        ((certificate.private_key, certificate.chain),),
        root_certificates=certificate.client_ca,
        require_client_auth=certificate.client_ca is not None,
    )
