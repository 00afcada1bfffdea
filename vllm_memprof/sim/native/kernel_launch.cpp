// Kernels brought along by other libraries: binaries load, functions have handles, launches do
// nothing.
#include <cstring>
#include <memory>

#include "error.h"
#include "graph.h"
#include "memory.h"
#include "ownership.h"

namespace memprof_sim {
namespace {
struct Binary {};
struct Function {};
Registry<Binary> &binaries() { return process_state<Registry<Binary>>(); }
Registry<Function> &functions() { return process_state<Registry<Function>>(); }
}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtBinaryLoadFromData(const void *data, size_t length,
                                          const aclrtBinaryLoadOptions *, aclrtBinHandle *handle) {
  if (!data || !length || !handle)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtBinaryLoadFromData: bad argument");
  *handle = binaries().add(std::make_unique<Binary>());
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtBinaryUnLoad(aclrtBinHandle handle) {
  if (!binaries().take(handle))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtBinaryUnLoad: unknown binary");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtBinaryGetFunction(const aclrtBinHandle handle, const char *name,
                                         aclrtFuncHandle *function) {
  if (!binaries().find(handle) || !name || !function)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtBinaryGetFunction: bad argument");
  *function = functions().add(std::make_unique<Function>());
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtBinaryGetFunctionByEntry(aclrtBinHandle handle, uint64_t,
                                                aclrtFuncHandle *function) {
  if (!binaries().find(handle) || !function)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtBinaryGetFunctionByEntry: bad argument");
  *function = functions().add(std::make_unique<Function>());
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetFunctionAddr(aclrtFuncHandle function, void **cube, void **vector) {
  if (!functions().find(function) || !cube || !vector)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetFunctionAddr: bad argument");
  *cube = *vector = function;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle, uint32_t, aclrtStream stream,
                                                aclrtLaunchKernelCfg *, void *, size_t,
                                                aclrtPlaceHolderInfo *, size_t) {
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetHardwareSyncAddr(void **address) {
  static uint64_t words[64];
  if (!address) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetHardwareSyncAddr: null argument");
  *address = words;
  return ACL_SUCCESS;
}

// The older runtime names (librt); no header declares them.
SHIM_API int rtDevBinaryRegister(const void *binary, void **handle) {
  if (!binary || !handle) return fail(ACL_ERROR_INVALID_PARAM, "rtDevBinaryRegister: bad argument");
  *handle = binaries().add(std::make_unique<Binary>());
  return ACL_SUCCESS;
}

SHIM_API int rtKernelLaunch(const void *, uint32_t, void *, uint32_t, void *, void *stream) {
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API int rtRegisterAllKernel(const void *binary, void **handle) {
  if (!binary || !handle) return fail(ACL_ERROR_INVALID_PARAM, "rtRegisterAllKernel: bad argument");
  *handle = binaries().add(std::make_unique<Binary>());
  return ACL_SUCCESS;
}

SHIM_API int rtDevBinaryUnRegister(void *handle) {
  if (!binaries().take(handle))
    return fail(ACL_ERROR_INVALID_PARAM, "rtDevBinaryUnRegister: unknown binary %p", handle);
  return ACL_SUCCESS;
}

// Launches by stub, by binary and tiling key, and on vector cores alone: alike but for where the
// stream stands.
SHIM_API int rtKernelLaunchWithFlagV2(const void *, uint32_t, void *, void *, void *stream,
                                      uint32_t, const void *) {
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API int rtKernelLaunchWithHandle(void *, uint64_t, uint32_t, void *, void *, void *stream,
                                      const void *) {
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API int rtKernelLaunchWithHandleV2(void *, uint64_t, uint32_t, void *, void *, void *stream,
                                        const void *) {
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API int rtVectorCoreKernelLaunchWithHandle(void *, uint64_t, uint32_t, void *, void *,
                                                void *stream, const void *) {
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API int rtMalloc(void **pointer, uint64_t bytes, uint32_t, uint16_t) {
  if (!pointer || !bytes) return fail(ACL_ERROR_INVALID_PARAM, "rtMalloc: bad argument");
  return device_allocate(pointer, bytes, kRuntime);
}

SHIM_API int rtFree(void *pointer) {
  if (!pointer) return fail(ACL_ERROR_INVALID_PARAM, "rtFree: null pointer");
  return device_free(pointer);
}

SHIM_API int rtGetC2cCtrlAddr(uint64_t *address, uint32_t *length) {
  static uint64_t words[64];
  if (!address || !length) return fail(ACL_ERROR_INVALID_PARAM, "rtGetC2cCtrlAddr: null argument");
  *address = reinterpret_cast<uint64_t>(words);
  *length = 64 * sizeof(uint64_t);
  return ACL_SUCCESS;
}

// Asked by kernels that a wheel brings along, to know whether they were compiled for this device:
// they do nothing here, so each device is of the type of the wheels.
SHIM_API int rtGetSocVersion(char *version, uint32_t capacity) {
  static const char kBuiltFor[] = "Ascend910B1";
  if (!version || capacity < sizeof kBuiltFor)
    return fail(ACL_ERROR_INVALID_PARAM, "rtGetSocVersion: bad argument");
  std::memcpy(version, kBuiltFor, sizeof kBuiltFor);
  return ACL_SUCCESS;
}
