"""Clients of an OpenAI server, in threads: requests one after another until they are told to stop.

Standard library only.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Answers:
    """What the clients got."""

    tokens: list[int] = field(default_factory=list)  # of each request that was answered
    seconds: list[float] = field(default_factory=list)  # of the same
    ended_s: list[float] = field(default_factory=list)  # of the same: time.monotonic()
    failures: list[str] = field(default_factory=list)  # what requests that were not answered met


class Load:
    """Clients that ask for completions.

    Args:
        port: of the server on 127.0.0.1.
        model: name that the server serves.
        clients: requests at once.
        prompt: of every request, behind its number.
        max_tokens: of every answer.
        key: of the server's API.
    """

    def __init__(
        self,
        port: int,
        model: str,
        clients: int,
        prompt: str = "a b c",
        max_tokens: int = 32,
        key: str = "",
    ) -> None:
        self.answers = Answers()
        self._port, self._prompt, self._key = port, prompt, key
        self._body = {"model": model, "max_tokens": max_tokens, "ignore_eos": True}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._count = 0
        self._threads = [
            threading.Thread(target=self._ask_on, name=f"client-{n}", daemon=True)
            for n in range(clients)
        ]

    def start(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, timeout_s: float = 120.0) -> Answers:
        """Let requests under way end, and return all answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)
        return self.answers

    def _ask_on(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                tokens = self._ask(connection)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                connection.close()
                if self._stop.is_set():
                    return
                with self._lock:
                    self.answers.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)
                continue
            with self._lock:
                self.answers.tokens.append(tokens)
                self.answers.ended_s.append(time.monotonic())
                self.answers.seconds.append(self.answers.ended_s[-1] - began)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> int:
        with self._lock:
            self._count += 1
            body = {**self._body, "prompt": f"{self._count} {self._prompt}"}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {text[:200]!r}")
        return int(json.loads(text)["usage"]["completion_tokens"])
