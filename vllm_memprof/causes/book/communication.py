"""Ranks and their links: HCCL, NCCL, Gloo, shared memory queues."""

from __future__ import annotations

from vllm_memprof.causes import cures as c
from vllm_memprof.causes.rows import SYMPTOM, WRAPPER, Row
from vllm_memprof.text import text

_CODES = "hiascend.com: HCCL error codes"

ROWS = (
    Row(
        kind="communicator-resources",
        title=text("queue pairs of the network card are refused by driver and firmware"),
        pattern=r"[Ff]ailed to allocate resource\[?\s?(?:qp|cq|QP|CQ)\]?|resource\[qp\]"
        r"|ra (?:typical )?qp create fail|CreateQp.{0,60}fail",
        example="EI0007: [PID: 1] Failed to allocate resource[qp] with info [send_cq_depth:32768]. "
        "Reason: Memory resources are exhausted.",
        cures=(c.DRIVER,),
        memory=False,
        source="vllm-ascend#9005",
    ),
    Row(
        kind="communicator-resources",
        title=text("a communicator finds no room for its buffers on the device"),
        pattern=r"resource\[?\s?DeviceMemory|EI0011|Failed to allocate \d+ bytes of NPU memory",
        example="EI0007: Failed to allocate resource[DeviceMemory] with info [size:209715200]. "
        "Reason: Memory resources are exhausted.",
        cures=(c.HCCL_BUFFER, c.SHARE_DOWN, c.STATIC_DOWN),
        source=_CODES,
    ),
    Row(
        kind="communicator-resources",
        title=text("a communicator gets no more streams, events or notifies"),
        pattern=r"[Ff]ailed to allocate resource\[?\s?(?:[Nn]otify|[Ss]tream|[Ee]vent|\w+)\]?"
        r"|EI0007|no notify resource",
        example="EI0007: Failed to allocate resource[Notify] with info [size:8]. Reason: Memory "
        "resources are exhausted.",
        unless=r"aclmdlRICapture|New capture stream failed",
        cures=(c.CAPTURE_SIZES, c.DRIVER),
        memory=False,
        source=_CODES,
    ),
    Row(
        kind="communicator-resources",
        title=text("NCCL finds no room for its buffers on the device"),
        pattern=r"Failed to CUDA (?:calloc|malloc)|NCCL WARN Cuda failure.{0,20}'?out of memory"
        r"|ncclUnhandledCudaError.{0,200}out of memory",
        example="NCCL WARN Cuda failure 2 'out of memory'\nncclUnhandledCudaError",
        cures=(c.SHARE_DOWN, c.STATIC_DOWN, c.FREE_DEVICE),
        quiet=True,
    ),
    Row(
        kind="communicator-resources",
        title=text("the buffer of the communicators is too small for the largest step"),
        pattern=r"HCCL_BUFFSIZE.{0,120}(?:too (?:small|SMALL)|should|less|insufficient|larger|least"
        r"|need)"
        r"|winSize.{0,80}(?:small|less)|buffer size.{0,60}HCCL_BUFFSIZE",
        example="EZ9999: HCCL_BUFFSIZE is too SMALL, maxBs = 512, NEEDED 300MB, "
        "HCCL_BUFFSIZE=200MB",
        cures=(c.BATCHED, c.HCCL_BUFFER),
        memory=False,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the port is in use by another process"),
        pattern=r"EJ0001|[Rr]a[_ ]?init.{0,60}(?:fail|rror)|HCCP process.{0,60}(?:fail|exist)",
        example="EJ0001: Failed to initialize the HCCP process. Reason: Maybe the last training "
        "process is running.",
        cures=(c.PORT, c.KILL_LEFT),
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("ranks did not reach each other in time"),
        pattern=r"EI0006|Getting socket times out|wait socket establish timeout|EI0015"
        r"|LINK_ERROR_INFO|[Tt]ransport init error|EI0009|EI0010|create Dest error|EI0002"
        r"|Notify register waits? (?:for|timeout)|EI0013|EI0018|error cqe|CQE error"
        r"|hccl fftsplus task timeout|stuck notify|Hccl\w*TimeoutError",
        unless=r"resource\[qp\]|EL0004|EI0007|Alloc sq cq fail",
        example="EI0006: [PID: 7] Getting socket times out. Reason: Remote Rank did not send the "
        "data in time.",
        cures=(c.FIRST_RANK, c.LINK, c.LINK_TIME),
        rank=SYMPTOM,
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("ranks run different releases of CANN or of HCCL"),
        pattern=r"EI0008|The (?:CANN|HCCL|\w+) versions are inconsistent",
        example="EI0008: The CANN versions are inconsistent: tag [x], local_version [1.83]",
        cures=(c.VERSIONS,),
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a variable or rank table of HCCL has a value that it does not take"),
        pattern=r"EI0001|EI0003|EI0004|EI0005|EI0014|EI0016|EI0017|ranktable.{0,60}(?:fail"
        r"|invalid)",
        example="EI0001: Value 9 for environment variable HCCL_OP_EXPANSION_MODE is invalid.",
        cures=(c.LINK, c.ARGUMENTS),
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a collective operation of NCCL failed or timed out"),
        pattern=r"ncclRemoteError|ncclSystemError|ncclInternalError|ncclInvalidUsage"
        r"|Watchdog caught collective operation timeout|NCCL error(?: in)?:"
        r"|unhandled system error|ncclUnhandledCudaError"
        r"|ProcessGroup(?:NCCL|HCCL).{0,120}(?:timeout|timed out)"
        r"|HCCL watchdog thread terminated",
        unless=r"out of memory|No space left|/dev/shm",
        example="torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:1, remote "
        "process "
        "exited or there was a network error\nncclRemoteError",
        cures=(c.FIRST_RANK, c.NETWORK),
        rank=SYMPTOM,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a collective operation of HCCL failed"),
        pattern=r"H(?:CCL|ccl) function error|OPS function error: Hccl"
        r"|[Hh]cclCommInit\w+.{0,60}error"
        r"|DIST call hccl api failed",
        unless=r"out of memory|EL0004|EI00|Alloc sq cq fail|2070\d\d",
        example="RuntimeError: HCCL function error: HcclGetRootInfo(&hcclID), error code is 7",
        cures=(c.FIRST_RANK, c.LINK, c.HCCL_PORT),
        rank=WRAPPER,
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("ranks did not find each other over the network"),
        pattern=r"client socket has (?:timed out|failed to connect)|TCPStore.{0,80}(?:timeout"
        r"|timed)"
        r"|connectFullMesh failed|Gloo.{0,80}(?:fail|timed out)|No route to host"
        r"|DistNetworkError|torch\.distributed\.DistStoreError|rendezvous.{0,60}(?:fail|timed)",
        unless=r"out of memory|EI0007|EL0004|(?i:address) already in use|Connection closed by peer",
        example="torch.distributed.DistNetworkError: The client socket has failed to connect to "
        "any "
        "network address of (10.0.0.1, 29500).",
        cures=(c.NETWORK, c.FIRST_RANK),
        rank=SYMPTOM,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a rank was lost: another failed before it, or the network did"),
        pattern=r"Connection closed by peer|Connection reset by peer|Broken pipe"
        r"|remote process exit"
        r"|RPC call to \w+ timed out|Timed? ?out waiting for (?:engine|worker|core)"
        r"|ActorDiedError|RayActorError|main process disappeared|exit code: -15\b",
        example="RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer",
        unless=r"out of memory|EL0004|EI0007|20700\d",
        cures=(c.FIRST_RANK, c.NETWORK),
        rank=WRAPPER,
        certain=False,
    ),
)
