// Physical memory apart from addresses: reserve, map, unmap, and handles that another process may
// import. All physical memory of a process lies in one sparse anonymous file per device, so that a
// mapping can be shared and thousands of handles cost one file descriptor.
#include "physical.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>

#include "accounting.h"
#include "device.h"
#include "error.h"
#include "ownership.h"
#include "pages.h"
#include "poison.h"
#include "profile.h"

namespace memprof_sim {
namespace {

constexpr int kHost = kMaxDevices;  // the place of physical memory that is the host's

struct Physical {
  int device;  // or kHost
  int file;
  bool imported;
  uint64_t offset;  // in the file
  uint64_t bytes;
  uint64_t shared_key = 0;
  int mappings = 0;
  bool freed = false;
};

struct Mapping {
  uint64_t bytes;
  std::shared_ptr<Physical> physical;
};

struct PhysicalState {
  std::mutex mutex;
  int file[kMaxDevices + 1];
  uint64_t next_offset[kMaxDevices + 1] = {};
  std::map<uintptr_t, uint64_t> reserved;  // address -> bytes
  std::map<uintptr_t, Mapping> mapped;
  PhysicalState() { std::fill(std::begin(file), std::end(file), -1); }
};

PhysicalState &state() { return forked_state<PhysicalState>(); }
Registry<Physical> &handles() { return process_state<Registry<Physical>>(); }

void release_locked(const std::shared_ptr<Physical> &physical) {
  if (physical->mappings > 0 || !physical->freed) return;
  if (physical->shared_key) share_forget(physical->shared_key);
  if (physical->imported) {
    close(physical->file);
  } else {
    fallocate(physical->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(physical->offset), static_cast<off_t>(physical->bytes));
    if (physical->device != kHost)
      account_release(physical_device(physical->device), kApp, physical->bytes);
  }
  handles().take(physical.get());
}

void unreserve_pages(uintptr_t address, uint64_t bytes) {
  mmap(reinterpret_cast<void *>(address), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace

bool physical_range(const void *pointer, uint64_t *bytes_left, int *device) {
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> guard(state().mutex);
  auto &mapped = state().mapped;
  auto next = mapped.upper_bound(address);
  if (next == mapped.begin()) return false;
  auto found = std::prev(next);
  uintptr_t end = found->first + found->second.bytes;
  if (address >= end) return false;
  int place = found->second.physical->device;
  if (device) *device = place;
  for (; next != mapped.end() && next->first == end; ++next)
    end = next->first + next->second.bytes;  // neighbours form one range
  if (bytes_left) *bytes_left = end - address;
  return place != kHost;
}

uint64_t physical_of_host(const void *pointer) {
  int place = 0;
  uint64_t left = 0;
  return !physical_range(pointer, &left, &place) && place == kHost ? left : 0;
}

void physical_forget_device(int device) {
  std::lock_guard<std::mutex> guard(state().mutex);
  auto &mapped = state().mapped;
  for (auto it = mapped.begin(); it != mapped.end();) {
    if (it->second.physical->device != device) {
      ++it;
      continue;
    }
    unreserve_pages(it->first, it->second.bytes);
    --it->second.physical->mappings;
    it = mapped.erase(it);
  }
  for (const std::shared_ptr<Physical> &physical : handles().all()) {
    if (physical->device != device) continue;
    physical->freed = true;
    release_locked(physical);
  }
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *properties,
                                                   aclrtMemGranularityOptions,
                                                   size_t *granularity) {
  if (!properties || !granularity)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtMemGetAllocationGranularity: null argument");
  *granularity = profile().huge_page_bytes;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtReserveMemAddress(void **address, size_t bytes, size_t alignment, void *,
                                         uint64_t) {
  if (!address || bytes == 0)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtReserveMemAddress: bad argument");
  uint64_t align = std::max<uint64_t>(alignment, profile().huge_page_bytes);
  void *mapped =
      mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "cannot reserve %zu bytes of addresses: %s", bytes,
                strerror(errno));
  uintptr_t start = reinterpret_cast<uintptr_t>(mapped), aligned = round_up(start, align);
  if (aligned > start) munmap(mapped, aligned - start);
  if (start + align > aligned)
    munmap(reinterpret_cast<void *>(aligned + bytes), start + align - aligned);
  std::lock_guard<std::mutex> guard(state().mutex);
  state().reserved[aligned] = bytes;
  *address = reinterpret_cast<void *>(aligned);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtReleaseMemAddress(void *address) {
  std::lock_guard<std::mutex> guard(state().mutex);
  auto found = state().reserved.find(reinterpret_cast<uintptr_t>(address));
  if (found == state().reserved.end())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%p was not reserved", address);
  auto inside = state().mapped.lower_bound(found->first);
  if (inside != state().mapped.end() && inside->first < found->first + found->second)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%p still has physical memory mapped", address);
  munmap(address, found->second);
  state().reserved.erase(found);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t bytes,
                                      const aclrtPhysicalMemProp *properties, uint64_t) {
  if (!handle || !properties || bytes == 0)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtMallocPhysical: bad argument");
  bool on_host = properties->location.type != ACL_MEM_LOCATION_TYPE_DEVICE;
  int device = on_host ? kHost : static_cast<int>(properties->location.id);
  if (!on_host && !device_valid(device))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtMallocPhysical: no device %d", device);
  uint64_t charged = round_up(bytes, profile().huge_page_bytes);
  if (!on_host && !account_charge(physical_device(device), kApp, charged))
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "device %d has no %llu bytes of physical memory left", device,
                static_cast<unsigned long long>(charged));
  std::lock_guard<std::mutex> guard(state().mutex);
  int &file = state().file[device];
  if (file < 0) file = memfd_create(on_host ? "pinned-host" : "memprof-sim-device", MFD_CLOEXEC);
  uint64_t offset = state().next_offset[device];
  if (file < 0 || ftruncate(file, static_cast<off_t>(offset + charged)) != 0) {
    if (!on_host) account_release(physical_device(device), kApp, charged);
    return fail(ACL_ERROR_BAD_ALLOC, "the host refused %llu bytes of sparse memory: %s",
                static_cast<unsigned long long>(charged), strerror(errno));
  }
  state().next_offset[device] = offset + charged;
  *handle =
      handles().add(std::make_unique<Physical>(Physical{device, file, false, offset, charged}));
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  std::lock_guard<std::mutex> guard(state().mutex);
  std::shared_ptr<Physical> physical = handles().find(handle);
  if (!physical || physical->freed)
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtFreePhysical: unknown handle %p", handle);
  physical->freed = true;  // the memory stays while it is mapped
  release_locked(physical);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtMapMem(void *address, size_t bytes, size_t offset, aclrtDrvMemHandle handle,
                              uint64_t) {
  std::lock_guard<std::mutex> guard(state().mutex);
  std::shared_ptr<Physical> physical = handles().find(handle);
  if (!physical || physical->freed)
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtMapMem: unknown handle %p", handle);
  uintptr_t start = reinterpret_cast<uintptr_t>(address);
  auto next = state().reserved.upper_bound(start);
  bool reserved = next != state().reserved.begin() &&
                  start + bytes <= std::prev(next)->first + std::prev(next)->second;
  if (!reserved || bytes == 0 || offset + bytes > physical->bytes)
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                "aclrtMapMem: %zu bytes at %p are not reserved, or more than the handle has", bytes,
                address);
  void *mapped =
      mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           physical->file, static_cast<off_t>(physical->offset + offset));
  if (mapped == MAP_FAILED)
    return fail(ACL_ERROR_BAD_ALLOC, "the host refused to map %zu bytes: %s", bytes,
                strerror(errno));
  ++physical->mappings;
  if (physical->device != kHost) poison_fresh(address, bytes);
  state().mapped[start] = {bytes, physical};
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtUnmapMem(void *address) {
  std::lock_guard<std::mutex> guard(state().mutex);
  auto found = state().mapped.find(reinterpret_cast<uintptr_t>(address));
  if (found == state().mapped.end())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: nothing is mapped at %p", address);
  unreserve_pages(found->first, found->second.bytes);
  std::shared_ptr<Physical> physical = found->second.physical;
  state().mapped.erase(found);
  --physical->mappings;
  release_locked(physical);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType,
                                                  uint64_t, uint64_t *shareable) {
  std::lock_guard<std::mutex> guard(state().mutex);
  std::shared_ptr<Physical> physical = handles().find(handle);
  if (!physical || !shareable)
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtMemExportToShareableHandle: unknown handle");
  if (!physical->shared_key) {
    uint64_t key = share_key();
    int device = physical->device == kHost ? kHost : physical_device(physical->device);
    if (!share_publish({key, getpid(), physical->file, device, physical->offset, physical->bytes}))
      return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "no room for another exported handle");
    physical->shared_key = key;
  }
  *shareable = physical->shared_key;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device,
                                                    aclrtDrvMemHandle *handle) {
  SharedHandle shared{};
  if (!handle || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtMemImportFromShareableHandle: bad argument");
  if (!share_find(shareable, &shared))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "no process exports this memory handle");
  int file = share_open(shared);
  if (file < 0)
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "cannot open the memory of process %d: %s", shared.pid,
                strerror(errno));
  if (shared.device == kHost) device = kHost;
  *handle = handles().add(std::make_unique<Physical>(
      Physical{device, file, true, shared.offset, shared.bytes}));  // its owner accounts for it
  return ACL_SUCCESS;
}
