"""Clients of SGLang's ``/generate`` that read their answers token by token, in threads.

Standard library only.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Streamed:
    """What the clients got; times are of ``time.monotonic()``, in seconds."""

    requests: int = 0  # that ended
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)  # from asking to the first token
    gaps_s: list[float] = field(default_factory=list)  # between two tokens of a request
    failures: list[str] = field(default_factory=list)


class Streams:
    """Clients that ask one request after the other, until they are told to stop.

    Args:
        port: of the server on 127.0.0.1.
        clients: requests at once.
        max_tokens: of every answer.
        limit: requests in all; None: until ``stop``.
    """

    def __init__(self, port: int, clients: int, max_tokens: int, limit: int | None = None) -> None:
        self.answers = Streamed()
        self._port, self._max_tokens, self._left = port, max_tokens, limit
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._asked = 0
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(clients)]

    def start(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def wait(self, timeout_s: float = 120.0) -> Streamed:
        """Return all answers once the last request has ended."""
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a request has not ended"
        return self.answers

    def stop(self) -> Streamed:
        self._stop.set()
        return self.wait()

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if self._left is not None and self._asked >= self._left:
                    return
                self._asked += 1
                number = self._asked
            try:
                self._ask(number)
            except (OSError, http.client.HTTPException, ValueError) as error:
                with self._lock:
                    self.answers.failures.append(f"{type(error).__name__}: {error}")
                return

    def _ask(self, number: int) -> None:
        body = {
            "input_ids": [1 + (number * 7 + at) % 900 for at in range(100 + number % 50)],
            "sampling_params": {
                "temperature": 0, "max_new_tokens": self._max_tokens, "ignore_eos": True,
            },
            "stream": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        began = time.monotonic()
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read()[:200]!r}")
        times = [
            time.monotonic()
            for line in answer
            if line.startswith(b"data:") and b"[DONE]" not in line
        ]
        connection.close()
        with self._lock:
            self.answers.requests += 1
            self.answers.tokens += len(times)
            self.answers.first_s.append(times[0] - began)
            self.answers.gaps_s += [later - at for at, later in pairwise(times)]
