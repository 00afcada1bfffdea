// Initialisation, devices, contexts, capabilities.
#include "shim.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

namespace memprof_sim {
namespace {

struct Context {
  int device;
};

constexpr int kMaxDevices = 64;

struct DeviceState {
  std::mutex mutex;
  Context primary[kMaxDevices];
  int references[kMaxDevices] = {};  // aclrtSetDevice minus aclrtResetDevice
  bool charged[kMaxDevices] = {};    // the context baseline
  std::vector<int> visible;
  int64_t parameters[16] = {};       // aclrtSetSysParamOpt
  bool parameter_set[16] = {};
};

thread_local Context *current_context = nullptr;
std::atomic<int> default_device{-1};  // of the configuration given to aclInit; -1: none

std::vector<int> visible_devices() {
  std::vector<int> result;
  int count = static_cast<int>(profile().device_count);
  const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!list) {
    for (int device = 0; device < count; ++device) result.push_back(device);
    return result;
  }
  for (const char *cursor = list; *cursor;) {
    char *end = nullptr;
    long device = strtol(cursor, &end, 10);
    if (end == cursor || device < 0 || device >= count) break;  // as the runtime: the list ends at the first bad entry
    result.push_back(static_cast<int>(device));
    cursor = *end == ',' ? end + 1 : end;
  }
  return result;
}

DeviceState *fresh_state() {
  auto *fresh = new DeviceState;
  for (int device = 0; device < kMaxDevices; ++device) fresh->primary[device].device = device;
  fresh->visible = visible_devices();
  return fresh;
}

DeviceState *device_state_pointer = nullptr;

void after_fork_in_child() {
  device_state_pointer = fresh_state();
  current_context = nullptr;
}

DeviceState &devices() {
  static std::once_flag once;
  std::call_once(once, [] {
    device_state_pointer = fresh_state();
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  });
  return *device_state_pointer;
}

Registry<Context> &created_contexts() {
  static auto *registry = new Registry<Context>;
  return *registry;
}

aclError check_profile() {
  if (profile().valid) return ACL_SUCCESS;
  static std::once_flag once;
  std::call_once(once, [] { fprintf(stderr, "[memprof simulated device] %s\n", profile().problem.c_str()); });
  return fail(ACL_ERROR_INVALID_FILE, "%s", profile().problem.c_str());
}

aclError charge_context(DeviceState &state, int device) {
  if (state.charged[device]) return ACL_SUCCESS;
  if (!account_available()) return ACL_ERROR_WRITE_FILE;
  uint64_t runtime = std::min(profile().context_runtime_bytes, profile().context_bytes);
  bool charged = account_charge(physical_device(device), kDevice, profile().context_bytes - runtime);
  if (charged && !account_charge(physical_device(device), kRuntime, runtime)) {
    account_release(physical_device(device), kDevice, profile().context_bytes - runtime);
    charged = false;
  }
  if (!charged)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d has no memory left for a context of %llu bytes", device,
                static_cast<unsigned long long>(profile().context_bytes));
  state.charged[device] = true;
  trace("context on device %d", device);
  return ACL_SUCCESS;
}

void release_device(DeviceState &state, int device) {
  state.references[device] = 0;
  if (!state.charged[device]) return;
  state.charged[device] = false;
  memory_forget_device(device);
  physical_forget_device(device);
  account_release_device(physical_device(device));
}

}  // namespace

// With a default device configured, whatever needs a context makes one there; asking which device is current does not.
int current_device() {
  if (!current_context && default_device >= 0) aclrtSetDevice(default_device);
  return current_context ? current_context->device : -1;
}
int visible_device_count() { return static_cast<int>(devices().visible.size()); }
bool device_valid(int device) { return device >= 0 && device < visible_device_count(); }
int physical_device(int device) { return device_valid(device) ? devices().visible[static_cast<size_t>(device)] : -1; }

}  // namespace memprof_sim

using namespace memprof_sim;

// Of the configuration file only {"defaultDevice": {"default_device": "N"}} means something here.
SHIM_API aclError aclInit(const char *path) {
  if (aclError status = check_profile()) return status;
  if (!path || !*path) return ACL_SUCCESS;
  std::ifstream input(path);
  if (!input) return fail(ACL_ERROR_INVALID_FILE, "aclInit: cannot read %s", path);
  std::string text((std::istreambuf_iterator<char>(input)), std::istreambuf_iterator<char>());
  size_t key = text.find("\"default_device\""), digit = text.find_first_of("0123456789", key);
  if (key != std::string::npos && digit != std::string::npos) default_device = atoi(text.c_str() + digit);
  return ACL_SUCCESS;
}

SHIM_API aclError aclFinalize() { return ACL_SUCCESS; }

SHIM_API aclError aclrtSetDevice(int32_t device) {
  if (aclError status = check_profile()) return status;
  if (!device_valid(device))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice: no device %d, %d are visible", device, visible_device_count());
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (aclError status = charge_context(state, device)) return status;
  ++state.references[device];
  current_context = &state.primary[device];
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtResetDevice(int32_t device) {
  if (!device_valid(device)) return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtResetDevice: no device %d", device);
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.references[device] > 0 && --state.references[device] == 0) release_device(state, device);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtResetDeviceForce(int32_t device) {
  if (!device_valid(device)) return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtResetDeviceForce: no device %d", device);
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  release_device(state, device);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetDevice(int32_t *device) {
  if (!device) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDevice: null argument");
  if (!current_context && default_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;  // asked in passing: not worth a message
  *device = current_context ? current_context->device : default_device.load();
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetDeviceCount(uint32_t *count) {
  if (!count) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceCount: null argument");
  if (aclError status = check_profile()) return status;
  *count = static_cast<uint32_t>(visible_device_count());
  if (*count == 0) return fail(ACL_ERROR_RT_NO_DEVICE, "no device is visible");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
  if (!context || !device_valid(device)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtCreateContext: bad argument");
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (aclError status = charge_context(state, device)) return status;
  current_context = created_contexts().add(new Context{device});
  *context = current_context;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtDestroyContext(aclrtContext context) {
  Context *found = created_contexts().find(context);
  if (!found) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtDestroyContext: unknown context");
  created_contexts().remove(context);
  if (current_context == found) current_context = nullptr;
  delete found;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (!context) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetCurrentContext: null argument");
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = current_context;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSetCurrentContext(aclrtContext context) {
  auto *candidate = static_cast<Context *>(context);
  DeviceState &state = devices();
  bool primary = candidate >= state.primary && candidate < state.primary + kMaxDevices;
  if (!primary && !created_contexts().find(context))
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetCurrentContext: unknown context");
  current_context = candidate;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  if (!active || !device_valid(device)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetPrimaryCtxState: bad argument");
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (flags) *flags = 0;
  *active = state.charged[device] ? 1 : 0;
  return ACL_SUCCESS;
}

SHIM_API const char *aclrtGetSocName() { return profile().valid ? profile().soc_name.c_str() : nullptr; }

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
  if (!uuid || !device_valid(device)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtDeviceGetUuid: bad argument");
  memset(uuid->bytes, 0, sizeof uuid->bytes);
  memcpy(uuid->bytes, "memprof-sim", 11);
  uuid->bytes[15] = static_cast<char>(physical_device(device));
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) {
  if (!logic || !device_valid(user)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetLogicDevIdByUserDevId: bad argument");
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
  if (!info || !device_valid(device)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceUtilizationRate: bad argument");
  uint64_t used = account_device_used(physical_device(device));
  *info = aclrtUtilizationInfo{};  // nothing computes: the cores are idle
  info->memoryUtilization = static_cast<int32_t>(used * 100 / profile().total_bytes);
  return ACL_SUCCESS;
}

SHIM_API aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
  if (!value || !device_valid(static_cast<int>(device)))
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: bad argument");
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = profile().ai_core_count; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = profile().vector_core_count; return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE: *value = profile().l2_cache_bytes; return ACL_SUCCESS;
    default: return fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: unknown attribute %d", info);
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
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = static_cast<int64_t>(profile().total_bytes); return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = profile().l2_cache_bytes; return ACL_SUCCESS;
    case ACL_DEV_ATTR_PHY_CHIP_ID: *value = physical_device(static_cast<int>(device)); return ACL_SUCCESS;
    case ACL_DEV_ATTR_IS_VIRTUAL: *value = 0; return ACL_SUCCESS;
    default: return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceInfo: attribute %d is not simulated", attribute);
  }
}

SHIM_API aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) {
  if (!value || !device_valid(device)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceResLimit: bad argument");
  *value = static_cast<uint32_t>(type == ACL_RT_DEV_RES_CUBE_CORE ? profile().ai_core_count : profile().vector_core_count);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t *value) {
  return aclrtGetDeviceResLimit(current_device(), type, value);
}

SHIM_API aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) {
  return aclrtGetDeviceResLimit(current_device(), type, value);
}

SHIM_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  if (option < 0 || option >= 16) return fail(ACL_ERROR_INVALID_PARAM, "aclrtSetSysParamOpt: unknown option %d", option);
  devices().parameters[option] = value;
  devices().parameter_set[option] = true;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  if (!value || option < 0 || option >= 16) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetSysParamOpt: bad argument");
  *value = devices().parameters[option];
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
SHIM_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }

SHIM_API aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
  if (!version) return fail(ACL_ERROR_INVALID_PARAM, "aclsysGetCANNVersion: null argument");
  if (profile().cann_version.empty()) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the device profile names no CANN version");
  *version = aclCANNPackageVersion{};
  const std::string &text = package == ACL_PKG_NAME_DRIVER ? profile().driver_version : profile().cann_version;
  snprintf(version->version, sizeof version->version, "%s", text.c_str());
  return ACL_SUCCESS;
}

SHIM_API aclError aclsysGetVersionStr(char *package, char *version) {
  if (!package || !version) return fail(ACL_ERROR_INVALID_PARAM, "aclsysGetVersionStr: null argument");
  if (profile().cann_version.empty()) return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the device profile names no CANN version");
  snprintf(version, ACL_PKG_VERSION_MAX_SIZE, "%s", profile().cann_version.c_str());
  return ACL_SUCCESS;
}

SHIM_API aclError aclGetCannAttributeList(const aclCannAttr **attributes, size_t *count) {
  static const aclCannAttr supported[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  if (!attributes || !count) return fail(ACL_ERROR_INVALID_PARAM, "aclGetCannAttributeList: null argument");
  *attributes = supported;
  *count = sizeof supported / sizeof *supported;
  return ACL_SUCCESS;
}

SHIM_API aclError aclGetCannAttribute(aclCannAttr, int32_t *value) {
  if (!value) return fail(ACL_ERROR_INVALID_PARAM, "aclGetCannAttribute: null argument");
  *value = 1;
  return ACL_SUCCESS;
}
