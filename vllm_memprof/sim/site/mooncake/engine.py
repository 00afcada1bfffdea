"""``mooncake.engine``: moves bytes between the memory of two processes on this machine.

What vllm-ascend's connectors call, with the results of mooncake-transfer-engine 0.3.13
(``mooncake-integration/transfer_engine/transfer_engine_py.cpp``): 0 for success, negative for a
failure. A simulated device's memory is memory of its process, which the kernel copies from one to
the other (``process_vm_readv``). As there, both ends must lie in registered memory.
"""

import contextlib
import ctypes
import json
import os
import socket
import threading

_MIB = 1 << 20
_VECTORS = 512  # of one call: the kernel takes 1,024
#: prctl: any process of this user may copy from and to this one, where Yama restricts it.
_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class TransferEngine:
    """One end; its port tells the others its process and its registered memory."""

    def __init__(self):
        self._regions = {}  # address -> bytes
        self._peers = {}  # host:port -> pid, regions
        self._pool = []  # device buffers of ASCEND_BUFFER_POOL
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._server = None

    def initialize(self, local_hostname, metadata_server, protocol, device_name):
        """Opens the port, and takes the buffers that ASCEND_BUFFER_POOL asks of the device.

        ``N:M`` are N buffers of M MiB; without it, and by ``0:0``, there are none.
        """
        self._libc.prctl(_SET_PTRACER, _ANY, 0, 0, 0)
        self._server = socket.create_server(("", 0))
        threading.Thread(target=self._answer, daemon=True).start()
        count, size = map(int, os.environ.get("ASCEND_BUFFER_POOL", "0:0").split(":"))
        for _ in range(count if size else 0):
            block = ctypes.c_void_p()
            acl = ctypes.CDLL("libascendcl.so")
            if acl.aclrtMalloc(ctypes.byref(block), ctypes.c_size_t(size * _MIB), 0):
                return -1
            self._pool.append(block)
        return 0

    def get_rpc_port(self):
        return self._server.getsockname()[1]

    def register_memory(self, buffer_addr, capacity):
        self._regions[buffer_addr] = capacity
        return 0

    def unregister_memory(self, buffer_addr):
        return 0 if self._regions.pop(buffer_addr, None) else -1

    def batch_register_memory(self, addresses, capacities):
        self._regions.update(zip(addresses, capacities, strict=True))
        return 0

    def transfer_sync_read(self, target_hostname, buffer, peer_buffer_address, length):
        return self.batch_transfer_sync_read(
            target_hostname, [buffer], [peer_buffer_address], [length]
        )

    def transfer_sync_write(self, target_hostname, buffer, peer_buffer_address, length):
        return self.batch_transfer_sync_write(
            target_hostname, [buffer], [peer_buffer_address], [length]
        )

    def batch_transfer_sync_read(self, target_hostname, buffers, peer_buffer_addresses, lengths):
        """Copies from the peer; ``target_hostname`` is its host and port."""
        return self._copy("process_vm_readv", target_hostname, buffers, peer_buffer_addresses,
                          lengths)  # fmt: skip

    def batch_transfer_sync_write(self, target_hostname, buffers, peer_buffer_addresses, lengths):
        """Copies to the peer."""
        return self._copy("process_vm_writev", target_hostname, buffers, peer_buffer_addresses,
                          lengths)  # fmt: skip

    def _copy(self, call, peer, local, remote, lengths):
        pid, known = self._peers.get(peer, (0, {}))
        if not _within(known, remote, lengths):
            try:
                host, _, port = peer.rpartition(":")
                with socket.create_connection((host, int(port)), 10) as link:
                    pid, listed = json.load(link.makefile())
            except (OSError, ValueError):
                return -1
            known = dict(listed)
            self._peers[peer] = pid, known
        if not (_within(known, remote, lengths) and _within(self._regions, local, lengths)):
            return -1
        for begin in range(0, len(lengths), _VECTORS):
            part = slice(begin, begin + _VECTORS)
            sizes = lengths[part]
            here, there = (
                (_Vector * len(sizes))(*zip(ends[part], sizes, strict=True))
                for ends in (local, remote)
            )
            copy = getattr(self._libc, call)
            copy.restype = ctypes.c_ssize_t
            count = ctypes.c_ulong(len(sizes))
            none = ctypes.c_ulong(0)
            if copy(ctypes.c_int(pid), here, count, there, count, none) != sum(sizes):
                return -1
        return 0

    def _answer(self):
        while True:
            link, _ = self._server.accept()
            with link, contextlib.suppress(OSError):
                link.sendall(json.dumps([os.getpid(), list(self._regions.items())]).encode())


def _within(regions, addresses, lengths):
    """Returns whether every range lies in one of the regions."""
    listed = list(regions.items())
    return bool(listed) and all(
        any(base <= at and at + length <= base + size for base, size in listed)
        for at, length in zip(addresses, lengths, strict=True)
    )
