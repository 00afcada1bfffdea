"""A proxy between clients and a prefill and a decode instance, as vllm-ascend's examples have it.

(vllm-ascend 0.23.0: examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py and
load_balance_proxy_layerwise_server_example.py)
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_TIMEOUT_S = 120.0


def post(url: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


class Proxy:
    """Sends each request to both instances.

    Args:
        prefill: port of the prefill instance.
        decode: port of the decode instance.
        layerwise: the decode instance asks for the prefill, once it has blocks for it; else the
            prefill instance comes first.
    """

    def __init__(self, prefill: int, decode: int, layerwise: bool) -> None:
        self.prefill, self.decode = (f"http://127.0.0.1:{port}" for port in (prefill, decode))
        self.layerwise = layerwise
        self.port = 0
        self._bodies: dict[str, tuple[str, dict[str, Any]]] = {}

    def complete(self, path: str, body: dict[str, Any], name: str) -> dict[str, Any]:
        if self.layerwise:
            # the id that the decode instance gives back, by the way of its API
            prefix = "chatcmpl-" if "chat" in path else "cmpl-"
            self._bodies[f"{prefix}{name}"] = self._bodies[f"{prefix}{name}-0"] = (path, body)
            asked = {"do_remote_prefill": True, "do_remote_decode": False,
                     "metaserver": f"http://127.0.0.1:{self.port}/v1/metaserver"}  # fmt: skip
        else:
            asked = self._prefill(path, body, name, {
                "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                "remote_block_ids": None, "remote_host": None, "remote_port": None,
            })["kv_transfer_params"]  # fmt: skip
        return post(self.decode + path, {**body, "kv_transfer_params": asked}, name)

    def asked_for(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run the prefill that the decode instance asks for."""
        path, body = self._bodies[message["request_id"]]
        name = message["request_id"].removeprefix("cmpl-").removesuffix("-0")
        return self._prefill(path, body, name, message)

    def _prefill(
        self, path: str, body: dict[str, Any], name: str, asked: dict[str, Any]
    ) -> dict[str, Any]:
        short = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": asked}
        return post(self.prefill + path, short, name)


@contextmanager
def proxy(prefill: int, decode: int, layerwise: bool = False) -> Iterator[int]:
    """Run a proxy for the time of a block; its port."""
    sends = Proxy(prefill, decode, layerwise)
    count = iter(range(1 << 30))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/metaserver":
                answer = sends.asked_for(body)
            else:
                answer = sends.complete(self.path, body, f"pd-{next(count)}")
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        sends.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield sends.port
        server.shutdown()
