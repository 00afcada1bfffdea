"""Codes of the CANN runtime and of its operators that say nothing of memory.

107xxx: a call with wrong arguments; 207xxx: a resource; 507xxx: a fault on the device; 161xxx,
361xxx and 561xxx: an operator of aclnn; EZ, E1 to E5, EE, EH: the layers below.
"""

from __future__ import annotations

from vllm_memprof.causes import cures as c
from vllm_memprof.causes.rows import SYMPTOM, WRAPPER, Row
from vllm_memprof.text import text

_CODES = "hiascend.com: aclError"
#: Codes of memory: rows above know them better.
_MEMORY = r"EL0004|EI0007|EI0011|out of memory|alloc device memory failed|Alloc sq cq fail"

#: How a code is printed.
_CODE = r"(?:error ?(?:code)?(?: is|:)?|runtime result =|ret:|ret =) ?"

ROWS = (
    Row(
        kind="not-memory-at-all",
        title=text("the device reports a memory error of its own: a fault of the hardware"),
        pattern=r"error code(?: is|:) ?5070(?:53|54|55|56)|multi-?bit ECC|uncorrectable ECC"
        r"|HBM.{0,30}(?:ECC|multi|fault)|[Dd]evice mem(?:ory)? error|Xid.{0,40}(?:48|63|64|79|94"
        r"|95)",
        example="RuntimeError: ACL stream synchronize failed, error code:507054\nHBM multi-bit ECC",
        cures=(c.HARDWARE,),
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a kernel took too long on the device: a fault or an old driver, not memory"),
        pattern=_CODE + r"5070(?:12|14|17|28|34|46)"
        r"|[Aa]i(?:core|cpu|vector|vec|v)?.{0,20}(?:execution times out|timeout)|aicore timeout"
        r"|[Ss]tream sync(?:hronize)? timeout",
        unless=_MEMORY,
        example="RuntimeError: ACL stream synchronize failed, error code:507014\n[Error]: The "
        "aicore execution times out.",
        cures=(c.DRIVER, c.FIRST_RANK, c.ENGINE_FIX),
        rank=SYMPTOM,
        source=_CODES + "; vllm-ascend#9005",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a kernel of the AI CPU failed: the driver and CANN do not fit together"),
        pattern=_CODE + r"5070(?:18|19|20)|errcode:11\d{3}"
        r"|aicpu exception|AICPU Kernel task happen error|E39999|E30008",
        unless=_MEMORY,
        example="E39999: an exception occurred during AICPU execution, errcode:21008, "
        "[aicpu exception].",
        cures=(c.DRIVER, c.ENVIRONMENT),
        rank=SYMPTOM,
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a kernel faulted on the device: an address or value that it cannot take"),
        pattern=_CODE + r"5070(?:15|16|35|36|11|27|13|57)"
        r"|aicore exception|vector core exception|MTE.{0,30}(?:fault|rror)|DDR address of the MTE"
        r"|sdma copy error|[Aa]icore error|EZ9903|EI0012|mte error|errcode.{0,8}address",
        unless=_MEMORY + "|npu_format_cast",
        example="RuntimeError: The Inner error is reported as above, error code is 507015\n"
        "[Error]: The aicore execution is abnormal.",
        cures=(c.ENGINE_FIX, c.NO_GRAPH_TEST, c.DRIVER),
        rank=SYMPTOM,
        source=_CODES,
    ),
    Row(
        kind="format-conversion",
        title=text("a tensor is converted to another layout, which needs a second copy of it"),
        pattern=r"error code is 507013|Memory async copy failed",
        beside=r"npu_format_cast|_convert_torch_format",
        example="    tensor = torch_npu.npu_format_cast(tensor, 29)\nRuntimeError: "
        "AclrtSynchronizeDeviceWithTimeout, error code is 507013",
        cures=(c.SHARE_DOWN, c.QUANTIZED),
        certain=False,
        source="vllm-ascend#3479",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the device or its driver stopped answering"),
        pattern=_CODE + r"507(?:000|001|010|033|89\d|90\d)"
        r"|ts lost heartbeat|[Dd]evice.{0,20}(?:heartbeat|offline|lost)|fell off the bus"
        r"|GPU is lost"
        r"|hdc disconnect|drv internal error",
        unless=_MEMORY,
        example="RuntimeError: NPU function error: aclrtSynchronizeStream, error code is 507010",
        cures=(c.HARDWARE, c.DRIVER),
        rank=SYMPTOM,
        source=_CODES,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("an operator got input that it does not take"),
        pattern=r"Invalid_Input\(|EZ000\d|EZ9999|error code(?: is|:) ?(?:561\d{3}|161\d{3}"
        r"|361\d{3})"
        r"|E[12]\d{4}: |E5\d{4}: |EZ2001|EZ1000|[Tt]iling.{0,60}fail|E89999|EH0001|aclnn\w+ failed",
        unless=_MEMORY + r"|EI00|wait socket|EZ1001|opp_kernel|50701|50703",
        example="call aclnnMoeDistributeDispatchV4 failed, error code is 561002\nInvalid_Input("
        "EZ0004): Parameter expertScales is required, but it is empty.",
        cures=(c.ENGINE_FIX, c.OPERATORS, c.VERSIONS),
        rank=SYMPTOM,
        source="hiascend.com: aclnn error codes",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the runtime was called with something that it does not take"),
        pattern=r"error code(?: is|:) ?(?:1000\d\d|1070\d\d|2070(?:00|02|03|1\d))|EE1001|EE1003"
        r"|EL0003|EL0001|feature not support",
        unless=_MEMORY + "|Register mem|MallocHost|captur",
        example="RuntimeError: NPU function error: aclrtMemcpy, error code is 107002",
        cures=(c.ENGINE_FIX, c.VERSIONS),
        rank=SYMPTOM,
        source=_CODES,
    ),
    Row(
        kind="other",
        title=text("CANN reports an inner error; the cause stands in its own log"),
        pattern=r"E[EH]9999|E19999|EE8888|ERR0\d{4} \w+|The Inner error is reported as above",
        example="RuntimeError: The Inner error is reported as above. The process exits for this "
        "inner error, and the current working operator name is Add.",
        cures=(c.FIRST_RANK, c.NO_GRAPH_TEST),
        rank=WRAPPER,
        memory=False,
        certain=False,
    ),
)
