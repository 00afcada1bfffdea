// Names that the headers of an older torch_npu do not declare: there, build.py defines
// LACKS_<name>. Numbers are CANN's. An engine that was built with such headers does not ask for
// them; the files of the shim stay the same for all.
#pragma once

#ifdef LACKS_aclrtHostFunc
using aclrtHostFunc = void (*)(void *);
#endif
#ifdef LACKS_aclrtPlaceHolderInfo
struct aclrtPlaceHolderInfo;
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

}  // namespace memprof_sim
