// Host memory: pinned memory is ordinary memory here.
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "error.h"
#include "ownership.h"
#include "pages.h"

namespace memprof_sim {
namespace {

struct Free {
  void operator()(void *block) const { free(block); }
};

struct HostState {
  std::mutex mutex;
  std::map<void *, std::unique_ptr<void, Free>> allocated;
  std::map<void *, uint64_t> registered;
};

HostState &host() { return process_state<HostState>(); }

aclError allocate_host(const char *function, void **pointer, uint64_t bytes) {
  if (!pointer || bytes == 0) return fail(ACL_ERROR_INVALID_PARAM, "%s: bad argument", function);
  void *block = nullptr;
  if (posix_memalign(&block, kHostPageBytes, bytes) != 0)
    return fail(ACL_ERROR_BAD_ALLOC, "%s: the host has no %llu bytes", function,
                static_cast<unsigned long long>(bytes));
  std::lock_guard<std::mutex> guard(host().mutex);
  host().allocated[block].reset(block);
  *pointer = block;
  return ACL_SUCCESS;
}

aclError register_host(const char *function, void *pointer, uint64_t bytes) {
  if (!pointer || bytes == 0) return fail(ACL_ERROR_INVALID_PARAM, "%s: bad argument", function);
  std::lock_guard<std::mutex> guard(host().mutex);
  host().registered[pointer] = bytes;
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtMallocHost(void **pointer, size_t bytes) {
  return allocate_host("aclrtMallocHost", pointer, bytes);
}

SHIM_API aclError aclrtMallocHostWithCfg(void **pointer, uint64_t bytes, aclrtMallocConfig *) {
  return allocate_host("aclrtMallocHostWithCfg", pointer, bytes);
}

SHIM_API aclError aclrtFreeHost(void *pointer) {
  std::lock_guard<std::mutex> guard(host().mutex);
  if (!host().allocated.erase(pointer))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: %p was not allocated", pointer);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtHostRegister(void *pointer, uint64_t bytes, aclrtHostRegisterType,
                                    void **device_pointer) {
  if (!device_pointer) return fail(ACL_ERROR_INVALID_PARAM, "aclrtHostRegister: null argument");
  *device_pointer = pointer;  // host and device share one address space here
  return register_host("aclrtHostRegister", pointer, bytes);
}

SHIM_API aclError aclrtHostRegisterV2(void *pointer, uint64_t bytes, uint32_t) {
  return register_host("aclrtHostRegisterV2", pointer, bytes);
}

SHIM_API aclError aclrtHostGetDevicePointer(void *host_pointer, void **device_pointer, uint32_t) {
  if (!host_pointer || !device_pointer)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtHostGetDevicePointer: null argument");
  *device_pointer = host_pointer;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtHostUnregister(void *pointer) {
  std::lock_guard<std::mutex> guard(host().mutex);
  if (!host().registered.erase(pointer))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostUnregister: %p was not registered", pointer);
  return ACL_SUCCESS;
}
