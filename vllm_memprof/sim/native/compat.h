// Names that the headers of an older torch_npu do not declare: there, build.py defines
// LACKS_<name>. Numbers are CANN's. An engine that was built with such headers does not ask for
// them; the files of the shim stay the same for all.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef LACKS_aclrtHostFunc
using aclrtHostFunc = void (*)(void *);
#endif
#ifdef LACKS_aclrtPlaceHolderInfo
struct aclrtPlaceHolderInfo;
#endif

// torch_npu 2.7.1 has older headers than the others: what it passes by pointer alone is not looked
// into, and enumerations are numbers.
#ifdef LACKS_aclrtLabel
using aclrtLabel = void *;
#endif
#ifdef LACKS_aclrtBinHandle
using aclrtBinHandle = void *;
#endif
#ifdef LACKS_aclrtFuncHandle
using aclrtFuncHandle = void *;
#endif
#ifdef LACKS_aclrtBinaryLoadOptions
struct aclrtBinaryLoadOptions;
#endif
#ifdef LACKS_aclrtLaunchKernelCfg
struct aclrtLaunchKernelCfg;
#endif
#ifdef LACKS_aclrtMallocConfig
struct aclrtMallocConfig;
#endif
#ifdef LACKS_aclrtMemGranularityOptions
using aclrtMemGranularityOptions = int;
#endif
#ifdef LACKS_aclrtDevAttr
using aclrtDevAttr = int;
#endif
#ifdef LACKS_aclrtStreamAttr
using aclrtStreamAttr = int;
#endif
#ifdef LACKS_aclrtDevResLimitType
using aclrtDevResLimitType = aclrtDevResModelType;
#endif
#ifdef LACKS_aclrtStreamAttrValue
union aclrtStreamAttrValue {
  uint64_t failureMode;
  uint32_t reserve[4];
};
#endif
#ifdef LACKS_aclrtUuid
struct aclrtUuid {
  char bytes[16];
};
#endif
#ifdef LACKS_aclrtPtrAttributes
struct aclrtPtrAttributes {
  aclrtMemLocation location;
  uint32_t pageSize;
  uint32_t rsv[4];
};
#endif
#ifdef LACKS_aclrtMemUsageInfo
struct aclrtMemUsageInfo {
  char name[32];
  uint64_t curMemSize;
  uint64_t memPeakSize;
  size_t reserved[8];
};
#endif
#ifdef LACKS_aclrtGetMemUsageInfo
extern "C" aclError aclrtGetMemUsageInfo(uint32_t, aclrtMemUsageInfo *, size_t, size_t *);
#endif

#ifdef LACKS_ACL_ERROR_RT_STREAM_CAPTURED
constexpr int ACL_ERROR_RT_STREAM_CAPTURED = 107027;
#endif
#ifdef LACKS_ACL_ERROR_RT_STREAM_NOT_CAPTURED
constexpr int ACL_ERROR_RT_STREAM_NOT_CAPTURED = 107029;
#endif
#ifdef LACKS_ACL_ERROR_STREAM_TASK_GROUP_STATUS
constexpr int ACL_ERROR_STREAM_TASK_GROUP_STATUS = 107033;
#endif
#ifdef LACKS_ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED
constexpr int ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED = 107036;
#endif
#ifdef LACKS_ACL_MEMCPY_DEFAULT
const auto ACL_MEMCPY_DEFAULT = static_cast<aclrtMemcpyKind>(4);
#endif
#ifdef LACKS_ACL_MEM_LOCATION_TYPE_UNREGISTERED
const auto ACL_MEM_LOCATION_TYPE_UNREGISTERED = static_cast<aclrtMemLocationType>(2);
#endif
#ifdef LACKS_HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET
constexpr uint32_t HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET = 0xffffffff;
#endif
#ifdef LACKS_HCCL_DATA_TYPE_INT128
constexpr int HCCL_DATA_TYPE_INT128 = 12;
#endif

#ifdef LACKS_ACL_DEV_ATTR_AICPU_CORE_NUM
constexpr int ACL_DEV_ATTR_AICPU_CORE_NUM = 1;
#endif
#ifdef LACKS_ACL_DEV_ATTR_AICORE_CORE_NUM
constexpr int ACL_DEV_ATTR_AICORE_CORE_NUM = 101;
#endif
#ifdef LACKS_ACL_DEV_ATTR_VECTOR_CORE_NUM
constexpr int ACL_DEV_ATTR_VECTOR_CORE_NUM = 201;
#endif

#ifdef LACKS_ACL_DEV_ATTR_CUBE_CORE_NUM
constexpr int ACL_DEV_ATTR_CUBE_CORE_NUM = 102;
#endif
#ifdef LACKS_ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE
constexpr int ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE = 301;
#endif
#ifdef LACKS_ACL_DEV_ATTR_L2_CACHE_SIZE
constexpr int ACL_DEV_ATTR_L2_CACHE_SIZE = 302;
#endif
#ifdef LACKS_ACL_DEV_ATTR_PHY_CHIP_ID
constexpr int ACL_DEV_ATTR_PHY_CHIP_ID = 402;
#endif
#ifdef LACKS_ACL_DEV_ATTR_IS_VIRTUAL
constexpr int ACL_DEV_ATTR_IS_VIRTUAL = 501;
#endif
#ifdef LACKS_ACL_DEV_ATTR_NPU_ARCH
constexpr int ACL_DEV_ATTR_NPU_ARCH = 601;
#endif

#ifdef LACKS_ACL_HIFLOAT8
constexpr int ACL_HIFLOAT8 = 34;
#endif
#ifdef LACKS_ACL_FLOAT8_E5M2
constexpr int ACL_FLOAT8_E5M2 = 35;
#endif
#ifdef LACKS_ACL_FLOAT8_E4M3FN
constexpr int ACL_FLOAT8_E4M3FN = 36;
#endif
#ifdef LACKS_ACL_FLOAT8_E8M0
constexpr int ACL_FLOAT8_E8M0 = 37;
#endif

namespace memprof_sim {

// The type of a declared function's first parameter; a few changed between int32_t and uint32_t.
template <typename Result, typename First, typename... Rest>
First first_parameter(Result (*)(First, Rest...));

// The same of the fourth, which is a pointer to a constant or not.
template <typename Result, typename A, typename B, typename C, typename Fourth, typename... Rest>
Fourth fourth_parameter(Result (*)(A, B, C, Fourth, Rest...));

}  // namespace memprof_sim
