// Device memory. A device byte is a byte of lazily mapped host memory: it costs host memory only
// when it is touched.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"
#include "error.h"
#include "ownership.h"
#include "pages.h"
#include "physical.h"
#include "poison.h"
#include "profile.h"

namespace memprof_sim {
namespace {

struct Block {
  uint64_t bytes;  // charged and mapped
  int device;
  Component component;
  uint64_t offset;      // in the file of its process
  uint64_t shared_key;  // by which other processes import it, or this one has; 0: none
  bool imported;
};

// All device memory that a process allocates lies in one sparse anonymous file, which others may
// map.
struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, Block> by_address;
  int file = -1;
  uint64_t end = 0;  // of what the file has had so far
};

Blocks &blocks() { return forked_state<Blocks>(); }

// Maps a file at a multiple of the huge page, as the device hands out addresses. Shared, so that
// the kernel counts its pages apart from the host memory of the process (/proc/self/statm).
void *map_lazily(int file, uint64_t offset, uint64_t bytes, uint64_t alignment) {
  uint64_t room = bytes + alignment;
  void *mapped = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  uintptr_t start = reinterpret_cast<uintptr_t>(mapped), aligned = round_up(start, alignment);
  if (aligned > start) munmap(mapped, aligned - start);
  uintptr_t end = start + room, wanted_end = aligned + round_up(bytes, host_page_bytes());
  if (end > wanted_end) munmap(reinterpret_cast<void *>(wanted_end), end - wanted_end);
  void *block = mmap(reinterpret_cast<void *>(aligned), bytes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, static_cast<off_t>(offset));
  if (block == MAP_FAILED) {
    munmap(reinterpret_cast<void *>(aligned), bytes);
    return nullptr;
  }
  madvise(block, bytes, MADV_NOHUGEPAGE);  // one touched byte must not cost 2 MiB of host
  return block;
}

void unmap(uintptr_t address, const Block &block) {
  munmap(reinterpret_cast<void *>(address), block.bytes);
  if (block.imported) return;
  fallocate(blocks().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(block.offset), static_cast<off_t>(block.bytes));
  if (block.shared_key) share_forget(block.shared_key);
}

// The block that begins here; the caller holds the lock.
Block *block_at(const void *pointer) {
  auto found = blocks().by_address.find(reinterpret_cast<uintptr_t>(pointer));
  return found == blocks().by_address.end() ? nullptr : &found->second;
}

uint64_t page_bytes(uint64_t bytes, aclrtMemMallocPolicy policy) {
  const Profile &device = profile();
  switch (policy & 0xff) {
    case ACL_MEM_MALLOC_NORMAL_ONLY:
    case ACL_MEM_MALLOC_NORMAL_ONLY_P2P: return device.normal_page_bytes;
    case ACL_MEM_MALLOC_HUGE1G_ONLY:
    case ACL_MEM_MALLOC_HUGE1G_ONLY_P2P: return 1ull << 30;
    case ACL_MEM_MALLOC_HUGE_ONLY:
    case ACL_MEM_MALLOC_HUGE_ONLY_P2P: return device.huge_page_bytes;
    default:
      return bytes >= device.huge_first_min_bytes ? device.huge_page_bytes
                                                  : device.normal_page_bytes;
  }
}

aclError allocate(void **pointer, uint64_t bytes, uint64_t page, Component component) {
  int device = current_device();
  if (device < 0)
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "device memory requested without a context");
  uint64_t charged = round_up(bytes, page);
  if (!account_charge(physical_device(device), component, charged)) {
    uint64_t total = total_bytes_of(physical_device(device));
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                "device %d has %llu of %llu bytes free, %llu requested", device,
                static_cast<unsigned long long>(
                    total - std::min(total, account_device_used(physical_device(device)))),
                static_cast<unsigned long long>(total), static_cast<unsigned long long>(charged));
  }
  std::lock_guard<std::mutex> guard(blocks().mutex);
  int &file = blocks().file;
  uint64_t offset = blocks().end;
  if (file < 0) file = memfd_create("memprof-sim-device", MFD_CLOEXEC);
  void *mapped =
      ftruncate(file, static_cast<off_t>(offset + charged)) != 0
          ? nullptr
          : map_lazily(file, offset, charged, std::min<uint64_t>(page, profile().huge_page_bytes));
  if (!mapped) {
    account_release(physical_device(device), component, charged);
    return fail(ACL_ERROR_BAD_ALLOC,
                "the host refused to map %llu bytes (see vm.overcommit_memory and ulimit -v)",
                static_cast<unsigned long long>(charged));
  }
  blocks().end = offset + charged;
  blocks().by_address[reinterpret_cast<uintptr_t>(mapped)] = {charged, device, component,
                                                              offset,  0,      false};
  poison_fresh(mapped, charged);
  *pointer = mapped;
  trace("malloc %s %llu -> %p", component_name(component), static_cast<unsigned long long>(charged),
        mapped);
  return ACL_SUCCESS;
}

aclError allocate_by_policy(const char *function, void **pointer, size_t bytes, uint64_t padding,
                            aclrtMemMallocPolicy policy) {
  if (!pointer || bytes == 0)
    return fail(ACL_ERROR_INVALID_PARAM, "%s: %zu bytes to %p", function, bytes,
                static_cast<void *>(pointer));
  uint64_t wanted = round_up(bytes, 32) + padding;
  return allocate(pointer, wanted, page_bytes(wanted, policy), kApp);
}

}  // namespace

aclError device_allocate(void **pointer, uint64_t bytes, Component component) {
  return allocate(pointer, bytes, profile().huge_page_bytes, component);
}

aclError device_free(void *pointer) {
  Block block;
  {
    std::lock_guard<std::mutex> guard(blocks().mutex);
    Block *found = block_at(pointer);
    if (!found || found->imported)
      return fail(ACL_ERROR_RT_PARAM_INVALID, "%p is not the start of a device allocation",
                  pointer);
    block = *found;
    blocks().by_address.erase(reinterpret_cast<uintptr_t>(pointer));
    unmap(reinterpret_cast<uintptr_t>(pointer), block);
  }
  account_release(physical_device(block.device), block.component, block.bytes);
  trace("free %s %llu at %p", component_name(block.component),
        static_cast<unsigned long long>(block.bytes), pointer);
  return ACL_SUCCESS;
}

void memory_forget_device(int device) {
  // In poison mode tensors have allocations of their own; Python frees the last after the reset.
  if (poison_mode) return;
  std::lock_guard<std::mutex> guard(blocks().mutex);
  auto &by_address = blocks().by_address;
  for (auto it = by_address.begin(); it != by_address.end();) {
    if (it->second.device != device) {
      ++it;
      continue;
    }
    unmap(it->first, it->second);
    it = by_address.erase(it);
  }
}

bool device_range(const void *pointer, uint64_t *bytes_left, int *device) {
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  {
    std::lock_guard<std::mutex> guard(blocks().mutex);
    auto next = blocks().by_address.upper_bound(address);
    if (next != blocks().by_address.begin()) {
      auto &[start, block] = *std::prev(next);
      if (address < start + block.bytes) {
        if (bytes_left) *bytes_left = start + block.bytes - address;
        if (device) *device = block.device;
        return true;
      }
    }
  }
  return physical_range(pointer, bytes_left, device);
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtMalloc(void **pointer, size_t bytes, aclrtMemMallocPolicy policy) {
  return allocate_by_policy("aclrtMalloc", pointer, bytes, profile().malloc_padding_bytes, policy);
}

SHIM_API aclError aclrtMallocAlign32(void **pointer, size_t bytes, aclrtMemMallocPolicy policy) {
  return allocate_by_policy("aclrtMallocAlign32", pointer, bytes, 0, policy);
}

SHIM_API aclError aclrtMallocWithCfg(void **pointer, size_t bytes, aclrtMemMallocPolicy policy,
                                     aclrtMallocConfig *) {
  return allocate_by_policy("aclrtMallocWithCfg", pointer, bytes, profile().malloc_padding_bytes,
                            policy);
}

SHIM_API aclError aclrtFree(void *pointer) {
  if (!pointer) return fail(ACL_ERROR_INVALID_PARAM, "aclrtFree: null pointer");
  return device_free(pointer);
}

SHIM_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
  if (!free_bytes || !total_bytes)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetMemInfo: null argument");
  int device = current_device();
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo: no context");
  await_launches();
  uint64_t used = account_device_used(physical_device(device));
  *total_bytes = total_bytes_of(physical_device(device));
  *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
  return ACL_SUCCESS;
}

// What the calling process holds, by the module that asked for it, largest first. (The driver keeps
// these counters in the process: svm_mem_statistics.c::halGetMemUsageInfo.)
using UsageDevice = decltype(first_parameter(aclrtGetMemUsageInfo));

SHIM_API aclError aclrtGetMemUsageInfo(UsageDevice id, aclrtMemUsageInfo *info, size_t capacity,
                                       size_t *count) {
  int device = static_cast<int>(id);
  if (!info || !count || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetMemUsageInfo: bad argument");
  Usage usage = account_own_usage(physical_device(device));
  std::vector<int> modules;
  for (int component = 0; component < kComponentCount; ++component)
    if (component != kDevice && usage.peak[component]) modules.push_back(component);
  std::stable_sort(modules.begin(), modules.end(),
                   [&](int a, int b) { return usage.current[a] > usage.current[b]; });
  if (modules.size() > capacity) modules.resize(capacity);
  for (size_t row = 0; row < modules.size(); ++row) {
    info[row] = aclrtMemUsageInfo{};
    snprintf(info[row].name, sizeof info[row].name, "%s", component_name(modules[row]));
    info[row].curMemSize = usage.current[modules[row]];
    info[row].memPeakSize = usage.peak[modules[row]];
  }
  *count = modules.size();
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
  if (!pointer || !attributes)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtPointerGetAttributes: null argument");
  *attributes = aclrtPtrAttributes{};
  int device = 0;
  bool on_device = device_range(pointer, nullptr, &device);
  attributes->location.type = on_device                      ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : host_range(pointer, nullptr) ? ACL_MEM_LOCATION_TYPE_HOST
                                                             : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  attributes->location.id = on_device ? static_cast<uint32_t>(device) : 0;
  attributes->pageSize =
      static_cast<uint32_t>(on_device ? profile().huge_page_bytes : profile().normal_page_bytes);
  return ACL_SUCCESS;
}

// Memory that another process imports counts in the process that exports it, and nowhere else.
SHIM_API aclError aclrtIpcMemGetExportKey(void *pointer, size_t, char *key, size_t room, uint64_t) {
  if (!pointer || !key)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtIpcMemGetExportKey: bad argument");
  std::lock_guard<std::mutex> guard(blocks().mutex);
  Block *block = block_at(pointer);
  if (!block || block->imported)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%p is not the start of a device allocation", pointer);
  if (!block->shared_key) {
    uint64_t fresh = share_key();
    if (!share_publish({fresh, getpid(), blocks().file, physical_device(block->device),
                        block->offset, block->bytes}))
      return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "no room for another exported allocation");
    block->shared_key = fresh;
  }
  snprintf(key, room, "%016" PRIx64, block->shared_key);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtIpcMemSetImportPid(const char *key, int32_t *, size_t) {
  SharedHandle shared{};
  if (!key || !share_find(strtoull(key, nullptr, 16), &shared))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "no process exports this memory");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtIpcMemImportByKey(void **pointer, const char *key, uint64_t) {
  SharedHandle shared{};
  int device = current_device();
  if (!pointer || !key || device < 0)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtIpcMemImportByKey: bad argument, or no context");
  if (!share_find(strtoull(key, nullptr, 16), &shared))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "no process exports this memory");
  int file = share_open(shared);
  if (file < 0)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "cannot open the memory of process %d: %s", shared.pid,
                strerror(errno));
  std::lock_guard<std::mutex> guard(blocks().mutex);
  void *mapped = map_lazily(file, shared.offset, shared.bytes, profile().huge_page_bytes);
  close(file);
  if (!mapped) return fail(ACL_ERROR_BAD_ALLOC, "the host refused to map the imported memory");
  blocks().by_address[reinterpret_cast<uintptr_t>(mapped)] = {shared.bytes,  device,     kApp,
                                                              shared.offset, shared.key, true};
  *pointer = mapped;
  return ACL_SUCCESS;
}

// Called by those who import and by those who export.
SHIM_API aclError aclrtIpcMemClose(const char *key) {
  if (!key) return fail(ACL_ERROR_INVALID_PARAM, "aclrtIpcMemClose: null argument");
  uint64_t wanted = strtoull(key, nullptr, 16);
  std::lock_guard<std::mutex> guard(blocks().mutex);
  auto &by_address = blocks().by_address;
  auto found = std::find_if(by_address.begin(), by_address.end(), [&](const auto &entry) {
    return wanted && entry.second.shared_key == wanted;
  });
  if (found == by_address.end())
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemClose: unknown key");
  if (found->second.imported) {
    unmap(found->first, found->second);
    by_address.erase(found);
  } else {
    share_forget(wanted);
    found->second.shared_key = 0;
  }
  return ACL_SUCCESS;
}
