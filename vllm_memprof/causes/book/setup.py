"""The installation: drivers, devices, operator packages, libraries, releases."""

from __future__ import annotations

from vllm_memprof.causes import cures as c
from vllm_memprof.causes.rows import SYMPTOM, WRAPPER, Row
from vllm_memprof.text import text

ROWS = (
    Row(
        kind="not-memory-at-all",
        title=text("the package with the operators' kernels is missing"),
        pattern=r"binary_info_config\.json|opp_kernel package|EZ1001|error code(?: is|:) ?561(?:107"
        r"|112|003)|EZ3003|EZ3002|opp path.{0,40}(?:fail|not)|kernel package.{0,40}(?:not|install)"
        r"|Get op (?:kernel|info).{0,40}fail|op_proto.{0,60}(?:fail|not found)",
        example="RuntimeError: call aclnnSwiGlu failed, detail:EZ1001: Get path and read "
        "binary_info_config.json failed, please check if the opp_kernel package is installed!",
        cures=(c.OPERATORS, c.ENVIRONMENT),
        source="hiascend.com: aclnn error codes",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("this chip or release has no such operator"),
        pattern=r"aclnn\w+(?:GetWorkspaceSize)? (?:or aclnn\w+ )?(?:not in|is not in|not found in)"
        r" lib|has no attribute 'npu_|Could not run '[\w:]+' with arguments from the '"
        r"|_OpNamespace' '\w+' object has no attribute|AclNN_\w+.{0,40}not support"
        r"|operator \S+ (?:does not exist|is not implemented)|no kernel image is available"
        r"|device kernel image is invalid|\w+Operation setup failed",
        example="RuntimeError: aclnnMoeInitRoutingV3 or aclnnMoeInitRoutingV3GetWorkspaceSize not "
        "in libopapi.so, or libopapi.sonot found.",
        cures=(c.OPERATORS, c.VERSIONS),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("this chip has no kernel for an operator of mixture-of-experts models"),
        pattern=r"of MoeInitRouting will be removed",
        beside=r"failed to start|rror",
        unless=r"out of memory|EL0004",
        example="[W120 MoeInitRoutingKernelNpuOpApi.cpp:28] Warning: The use of MoeInitRouting "
        "will be removed\nERROR core.py] EngineCore failed to start.",
        cures=(c.OPERATORS, c.VERSIONS),
        quiet=True,
        certain=False,
        rank=WRAPPER,
        source="vllm-ascend#4682",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("CANN cannot be set up: parts of its installation are missing or mixed"),
        pattern=r"init runtime platform info failed|GEInitialize failed|GELib::InnerInitialize"
        r"|error code(?: is|:) ?50000[1-4]|SetPrecisionMode.{0,200}50000|open so failed"
        r"|errcode:11002|InitOpsKernelInfoStore|OpsKernelManager",
        example="RuntimeError: SetPrecisionMode NPU function error: AclSetCompileopt, error code "
        "is 500001\n[Error]: The internal ACL of the system is incorrect.",
        cures=(c.ENVIRONMENT, c.OPERATORS, c.DRIVER),
        source="vllm-ascend#692",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the driver does not serve this process: too old, or not reachable from here"),
        pattern=r"error code(?: is|:) ?507899|runtime result = 507899|Get ?[Dd]evice ?[Cc](?:ou)?nt"
        r".{0,30}fail|[Gg]et device count failed|drv devId is invalid|dcmi model initialized failed"
        r"|get hardware version fail|driver version.{0,60}(?:too (?:old|low)|not match|mismatch"
        r"|insufficient)|libascend_hal\.so|aclInit.{0,40}fail|rtSetDevice.{0,60}fail"
        r"|upgrade (?:the )?(?:driver|HDK|firmware)",
        unless=r"Alloc sq cq fail|capture|out of memory",
        example="rtGetDeviceCount execution failed, reason=driver error:internal error\n"
        "get device count failed, runtime result = 507899.",
        cures=(c.DRIVER, c.DEVICES),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the driver of the graphics card is older than this build needs"),
        pattern=r"driver version is insufficient|The NVIDIA driver on your system is too old"
        r"|Found no NVIDIA driver|forward compatibility was attempted|cudaErrorInsufficientDriver"
        r"|unsupported display driver|PTX was compiled with an unsupported toolchain"
        r"|the provided PTX was compiled",
        example="RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        cures=(c.DRIVER_CUDA,),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the devices that are asked for are not there"),
        pattern=r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device"
        r"|error code(?: is|:) ?(?:107001|207004)|Invalid device ID|CUDA-capable device\(s\) is/are"
        r" busy|CUDA-capable devices are busy|did you call init\?|cudaGetDeviceCount\(\)"
        r"|Failed to infer device type|device id.{0,40}(?:invalid|out of range)|No NPU"
        r"|Device string must not be empty",
        example="RuntimeError: CUDA error: invalid device ordinal",
        cures=(c.DEVICES, c.DEVICES_CUDA, c.DRIVER),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the user may not use the device or a file"),
        pattern=r"error code(?: is|:) ?207006|\[Errno 13\]|Permission denied: ",
        example="PermissionError: [Errno 13] Permission denied: '/dev/davinci0'",
        cures=(c.DEVICES,),
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a library or Python package is missing or of another release"),
        pattern=r"(?:ImportError|ModuleNotFoundError): |cannot open shared object file"
        r"|undefined symbol:|version `(?:GLIBC|CXXABI|GLIBCXX)|InvalidVersion|incompatible version",
        unless=r"out of memory|EL0004",
        example="ImportError: libhccl.so: cannot open shared object file: No such file or "
        "directory",
        cures=(c.VERSIONS, c.ENVIRONMENT),
        rank=SYMPTOM,
    ),
    Row(
        kind="not-memory-at-all",
        title=text("the device was used before the workers were forked"),
        pattern=r"Cannot re-initialize (?:CUDA|NPU) in forked subprocess",
        example="RuntimeError: Cannot re-initialize CUDA in forked subprocess.",
        cures=(c.SPAWN,),
        source="docs.vllm.ai: Troubleshooting",
    ),
    Row(
        kind="not-memory-at-all",
        title=text("a compiler or a tool that it calls failed"),
        pattern=r"nvcc fatal|BackendCompilerFailed|InductorError|torch\._dynamo\.exc\.|E40021"
        r"|E40024"
        r"|MLIRCompilationError|CompilationError|ninja: build stopped|fatal error: Python\.h"
        r"|gcc.{0,60}(?:fail|not found)|bishengir-compile|E9[0-9]{4}: Compile|ub overflow"
        r"|OutOfResources: out of resource|Compile operator failed",
        unless=r"out of memory\. Tried",
        example="torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: gcc failed",
        cures=(c.ENGINE_FIX, c.EAGER, c.VERSIONS),
        rank=SYMPTOM,
    ),
)
