// Capabilities, versions and health of the devices.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "accounting.h"
#include "device.h"
#include "error.h"
#include "ownership.h"
#include "profile.h"

namespace memprof_sim {
namespace {

constexpr int kSystemParameters = 16;
using SystemParameters = std::array<int64_t, kSystemParameters>;  // aclrtSetSysParamOpt
SystemParameters &system_parameters() { return forked_state<SystemParameters>(); }

// What CANN's compiler calls __NPU_ARCH__, by the beginning of the SoC's name; 0 is unknown.
int64_t architecture() {
  struct Row {
    const char *soc;
    int64_t architecture;
  };
  for (Row row : {Row{"Ascend910B", 2201}, Row{"Ascend910_93", 2201}, Row{"Ascend310P", 2002},
                  Row{"Ascend950", 3510}})
    if (profile().soc_name.rfind(row.soc, 0) == 0) return row.architecture;
  return 0;
}

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API const char *aclrtGetSocName() {
  return profile().valid ? profile().soc_name.c_str() : nullptr;
}

SHIM_API aclError aclrtGetRunMode(aclrtRunMode *mode) {
  if (!mode) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetRunMode: null argument");
  *mode = ACL_HOST;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtDeviceGetBareTgid(int32_t *pid) {
  if (!pid) return fail(ACL_ERROR_INVALID_PARAM, "aclrtDeviceGetBareTgid: null argument");
  *pid = getpid();
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
  if (!uuid || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtDeviceGetUuid: bad argument");
  memset(uuid->bytes, 0, sizeof uuid->bytes);
  memcpy(uuid->bytes, "memprof-sim", 11);
  uuid->bytes[15] = static_cast<char>(physical_device(device));
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) {
  if (!logic || !device_valid(user))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetLogicDevIdByUserDevId: bad argument");
  *logic = physical_device(user);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
  if (!can || !device_valid(device) || !device_valid(peer))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtDeviceCanAccessPeer: bad argument");
  *can = device != peer;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *info) {
  if (!info || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceUtilizationRate: bad argument");
  uint64_t used = account_device_used(physical_device(device));
  uint64_t total = total_bytes_of(physical_device(device));
  *info = aclrtUtilizationInfo{};  // nothing computes: the cores are idle
  info->memoryUtilization = static_cast<int32_t>(used * 100 / total);
  return ACL_SUCCESS;
}

SHIM_API aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
  if (!value || !device_valid(static_cast<int>(device)))
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: bad argument");
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = profile().ai_core_count; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = profile().vector_core_count; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE: *value = profile().l2_cache_bytes; return ACL_SUCCESS;
    default:
      return fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: unknown attribute %d", info);
  }
}

SHIM_API aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
  if (!value || !device_valid(static_cast<int>(device)))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceInfo: bad argument");
  switch (static_cast<int>(attribute)) {
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = profile().ai_cpu_count; return ACL_SUCCESS;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = profile().ai_core_count; return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = profile().vector_core_count; return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
      *value = static_cast<int64_t>(total_bytes_of(physical_device(static_cast<int>(device))));
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = profile().l2_cache_bytes; return ACL_SUCCESS;
    case ACL_DEV_ATTR_PHY_CHIP_ID:
      *value = physical_device(static_cast<int>(device));
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_IS_VIRTUAL: *value = 0; return ACL_SUCCESS;
    case ACL_DEV_ATTR_NPU_ARCH: *value = architecture(); return ACL_SUCCESS;
    default:
      return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceInfo: attribute %d is not simulated",
                  attribute);
  }
}

SHIM_API aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type,
                                         uint32_t *value) {
  if (!value || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceResLimit: bad argument");
  *value = static_cast<uint32_t>(type == ACL_RT_DEV_RES_CUBE_CORE ? profile().ai_core_count
                                                                  : profile().vector_core_count);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t *value) {
  return aclrtGetDeviceResLimit(current_device(), type, value);
}

SHIM_API aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) {
  return aclrtGetDeviceResLimit(current_device(), type, value);
}

SHIM_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  if (option < 0 || option >= kSystemParameters)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtSetSysParamOpt: unknown option %d", option);
  system_parameters()[option] = value;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  if (!value || option < 0 || option >= kSystemParameters)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetSysParamOpt: bad argument");
  *value = system_parameters()[option];
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}
SHIM_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  return aclrtGetSysParamOpt(option, value);
}

SHIM_API aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
  if (!version) return fail(ACL_ERROR_INVALID_PARAM, "aclsysGetCANNVersion: null argument");
  if (profile().cann_version.empty())
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the device profile names no CANN version");
  *version = aclCANNPackageVersion{};
  const std::string &text =
      package == ACL_PKG_NAME_DRIVER ? profile().driver_version : profile().cann_version;
  snprintf(version->version, sizeof version->version, "%s", text.c_str());
  return ACL_SUCCESS;
}

SHIM_API aclError aclsysGetVersionStr(char *package, char *version) {
  if (!package || !version)
    return fail(ACL_ERROR_INVALID_PARAM, "aclsysGetVersionStr: null argument");
  if (profile().cann_version.empty())
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the device profile names no CANN version");
  snprintf(version, ACL_PKG_VERSION_MAX_SIZE, "%s", profile().cann_version.c_str());
  return ACL_SUCCESS;
}

SHIM_API aclError aclGetCannAttributeList(const aclCannAttr **attributes, size_t *count) {
  static const aclCannAttr supported[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16,
                                          ACL_CANN_ATTR_JIT_COMPILE};
  if (!attributes || !count)
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetCannAttributeList: null argument");
  *attributes = supported;
  *count = sizeof supported / sizeof *supported;
  return ACL_SUCCESS;
}

SHIM_API aclError aclGetCannAttribute(aclCannAttr, int32_t *value) {
  if (!value) return fail(ACL_ERROR_INVALID_PARAM, "aclGetCannAttribute: null argument");
  *value = 1;
  return ACL_SUCCESS;
}

#ifndef LACKS_aclrtErrorInfo
SHIM_API aclError aclrtGetErrorVerbose(int32_t device, aclrtErrorInfo *info) {
  if (!info || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetErrorVerbose: bad argument");
  *info = aclrtErrorInfo{};
  info->errorType = ACL_RT_NO_ERROR;
  return ACL_SUCCESS;
}
#endif

SHIM_API aclError aclrtGetMemUceInfo(int32_t, aclrtMemUceInfo *, size_t, size_t *count) {
  if (!count) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetMemUceInfo: null argument");
  *count = 0;  // a simulated device has no uncorrectable memory errors
  return ACL_SUCCESS;
}
