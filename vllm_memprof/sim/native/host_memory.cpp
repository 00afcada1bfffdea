// Host memory: pinned memory is ordinary memory here. Where MEMPROF_SIM_LIMITS names memlock, a
// process has as much of it as RLIMIT_MEMLOCK allows.
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "error.h"
#include "memory.h"
#include "ownership.h"
#include "pages.h"
#include "physical.h"
#include "profile.h"

namespace memprof_sim {
namespace {

struct Free {
  void operator()(void *block) const { free(block); }
};

struct Pinned {
  std::unique_ptr<void, Free> block;
  uint64_t bytes;
};

struct HostState {
  std::mutex mutex;
  std::map<void *, Pinned> allocated;
  std::map<void *, uint64_t> registered;
};

HostState &host() { return process_state<HostState>(); }

// What is left behind an address of the range that begins at or before it; 0: it ends before.
template <typename Map, typename Size>
uint64_t left_of(const Map &ranges, const char *address, Size size) {
  auto next = ranges.upper_bound(const_cast<char *>(address));
  if (next == ranges.begin()) return 0;
  const char *end = static_cast<char *>(std::prev(next)->first) + size(std::prev(next)->second);
  return address < end ? static_cast<uint64_t>(end - address) : 0;
}

// Whether the limit of locked memory leaves no room for that many bytes more.
bool refused(uint64_t bytes) {
  static const bool asked = limit_asked("memlock");
  rlimit limit{};
  if (!asked || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return false;
  for (const auto &[pointer, pinned] : host().allocated) bytes += pinned.bytes;
  for (const auto &[pointer, registered] : host().registered) bytes += registered;
  return bytes > limit.rlim_cur;
}

aclError no_host_memory(const char *call, uint64_t bytes) {
  return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
              "Memory_Allocation_Failure(EL0004): Failed to allocate memory.\n"
              "        TraceBack (most recent call last):\n"
              "        Host memory malloc failed, size=%llu.\n"
              "        %s execution failed, reason=driver error:out of memory",
              static_cast<unsigned long long>(bytes), call);
}

aclError allocate_host(const char *function, void **pointer, uint64_t bytes) {
  if (!pointer || bytes == 0) return fail(ACL_ERROR_INVALID_PARAM, "%s: bad argument", function);
  void *block = nullptr;
  if (posix_memalign(&block, host_page_bytes(), bytes) != 0)
    return fail(ACL_ERROR_BAD_ALLOC, "%s: the host has no %llu bytes", function,
                static_cast<unsigned long long>(bytes));
  std::lock_guard<std::mutex> guard(host().mutex);
  if (refused(bytes)) {
    free(block);
    return no_host_memory("rtMallocHost", bytes);
  }
  host().allocated[block] = {std::unique_ptr<void, Free>(block), bytes};
  *pointer = block;
  return ACL_SUCCESS;
}

aclError register_host(const char *function, void *pointer, uint64_t bytes) {
  if (!pointer || bytes == 0) return fail(ACL_ERROR_INVALID_PARAM, "%s: bad argument", function);
  std::lock_guard<std::mutex> guard(host().mutex);
  if (refused(bytes)) return no_host_memory("rtHostRegister", bytes);
  host().registered[pointer] = bytes;
  return ACL_SUCCESS;
}

}  // namespace

bool host_range(const void *pointer, uint64_t *bytes_left) {
  auto address = static_cast<const char *>(pointer);
  uint64_t left = physical_of_host(pointer);
  if (!left) {
    std::lock_guard<std::mutex> guard(host().mutex);
    left =
        std::max(left_of(host().allocated, address, [](const Pinned &each) { return each.bytes; }),
                 left_of(host().registered, address, [](uint64_t bytes) { return bytes; }));
  }
  if (bytes_left) *bytes_left = left;
  return left > 0;
}

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
