// Copies and fills. Up to the profile's kept_copy_bytes they move real bytes; a larger copy to the
// device costs no host memory: its destination reads as zeros afterwards. A copy to the host always
// delivers what the device holds.
#include "copy.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "error.h"
#include "graph.h"
#include "memory.h"
#include "pages.h"
#include "poison.h"
#include "profile.h"

namespace memprof_sim {
namespace {

// Makes device bytes zero and gives their host pages back.
void drop(void *destination, uint64_t bytes) {
  uintptr_t start = reinterpret_cast<uintptr_t>(destination), end = start + bytes;
  uintptr_t first_page = round_up(start, host_page_bytes()),
            last_page = end / host_page_bytes() * host_page_bytes();
  if (first_page >= last_page) {
    memset(destination, 0, bytes);
    return;
  }
  memset(destination, 0, first_page - start);
  memset(reinterpret_cast<void *>(last_page), 0, end - last_page);
  void *pages = reinterpret_cast<void *>(first_page);
  // MADV_REMOVE is for the shared mappings of physical memory, MADV_DONTNEED for private ones.
  if (madvise(pages, last_page - first_page, MADV_REMOVE) != 0)
    madvise(pages, last_page - first_page, MADV_DONTNEED);
}

bool all_zero(const void *bytes, uint64_t count) {
  const char *begin = static_cast<const char *>(bytes);
  return *begin == 0 && memcmp(begin, begin + 1, count - 1) == 0;
}

// The bytes must lie inside one device allocation; memory that is not the device's is the caller's
// own.
aclError check_range(const char *function, const void *pointer, uint64_t bytes, bool *on_device) {
  uint64_t left = 0;
  *on_device = device_range(pointer, &left, nullptr);
  if (*on_device && bytes > left)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %llu bytes at %p, the allocation ends after %llu",
                function, static_cast<unsigned long long>(bytes), pointer,
                static_cast<unsigned long long>(left));
  return ACL_SUCCESS;
}

aclError copy(const char *function, void *destination, uint64_t room, const void *source,
              uint64_t bytes, aclrtMemcpyKind kind) {
  if (bytes == 0) return ACL_SUCCESS;
  if (!destination || !source || bytes > room)
    return fail(ACL_ERROR_INVALID_PARAM, "%s: %llu bytes from %p into %llu bytes at %p", function,
                static_cast<unsigned long long>(bytes), source,
                static_cast<unsigned long long>(room), destination);
  bool to_device = false, from_device = false;
  if (aclError status = check_range(function, destination, bytes, &to_device)) return status;
  if (aclError status = check_range(function, source, bytes, &from_device)) return status;
  bool needs_device_destination =
      kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  bool needs_device_source =
      kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if ((needs_device_destination && !to_device) || (needs_device_source && !from_device))
    trace("%s: kind %d with a pointer that is not device memory (%p <- %p)", function, kind,
          destination, source);
  if (from_device && !to_device) poison_host_read(function, source, bytes);
  if (to_device)
    keep_copy(destination, source, bytes, from_device);
  else
    memmove(destination, source, bytes);
  return ACL_SUCCESS;
}

aclError copy_rows(const char *function, char *destination, uint64_t destination_pitch,
                   const char *source, uint64_t source_pitch, uint64_t width, uint64_t height,
                   aclrtMemcpyKind kind) {
  if (width > destination_pitch || width > source_pitch)
    return fail(ACL_ERROR_INVALID_PARAM, "%s: rows of %llu bytes exceed the pitch", function,
                static_cast<unsigned long long>(width));
  bool dropped = kind != ACL_MEMCPY_DEVICE_TO_HOST && kind != ACL_MEMCPY_HOST_TO_HOST &&
                 width * height > profile().kept_copy_bytes;
  for (uint64_t row = 0; row < height; ++row) {
    if (dropped) {
      poison_left(destination + row * destination_pitch, width,
                  "a copy to the device that is not kept");
      drop(destination + row * destination_pitch, width);
      continue;
    }
    if (aclError status = copy(function, destination + row * destination_pitch, width,
                               source + row * source_pitch, width, kind))
      return status;
  }
  return ACL_SUCCESS;
}

aclError fill(const char *function, void *pointer, uint64_t room, int value, uint64_t bytes) {
  if (bytes == 0) return ACL_SUCCESS;
  if (!pointer || bytes > room) return fail(ACL_ERROR_INVALID_PARAM, "%s: bad argument", function);
  bool on_device = false;
  if (aclError status = check_range(function, pointer, bytes, &on_device)) return status;
  if (on_device)
    keep_set(pointer, value, bytes);
  else
    memset(pointer, value, bytes);
  return ACL_SUCCESS;
}

}  // namespace

void keep_copy(void *destination, const void *source, uint64_t bytes, bool from_device) {
  if (destination == source) return;
  if (bytes > profile().kept_copy_bytes) {
    if (poison_mode && (from_device || !all_zero(source, bytes)))
      poison_left(destination, bytes, "a copy to the device that is not kept");
    else
      poison_known(destination, bytes);
    return drop(destination, bytes);
  }
  if (from_device)
    poison_copy(destination, source, bytes);
  else
    poison_known(destination, bytes);
  memmove(destination, source, bytes);
}

void keep_set(void *destination, int value, uint64_t bytes) {
  if (bytes > profile().kept_copy_bytes && value != 0)
    poison_left(destination, bytes, "a fill that is not kept");
  else
    poison_known(destination, bytes);
  if (bytes <= profile().kept_copy_bytes)
    memset(destination, value, bytes);
  else
    drop(destination, bytes);
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtMemcpy(void *destination, size_t room, const void *source, size_t bytes,
                              aclrtMemcpyKind kind) {
  return copy("aclrtMemcpy", destination, room, source, bytes, kind);
}

SHIM_API aclError aclrtMemcpyAsync(void *destination, size_t room, const void *source, size_t bytes,
                                   aclrtMemcpyKind kind, aclrtStream stream) {
  graph_count_task(stream);
  return copy("aclrtMemcpyAsync", destination, room, source, bytes, kind);
}

SHIM_API aclError aclrtMemcpyAsyncWithCondition(void *destination, size_t room, const void *source,
                                                size_t bytes, aclrtMemcpyKind kind,
                                                aclrtStream stream) {
  graph_count_task(stream);
  return copy("aclrtMemcpyAsyncWithCondition", destination, room, source, bytes, kind);
}

SHIM_API aclError aclrtMemcpy2d(void *destination, size_t destination_pitch, const void *source,
                                size_t source_pitch, size_t width, size_t height,
                                aclrtMemcpyKind kind) {
  return copy_rows("aclrtMemcpy2d", static_cast<char *>(destination), destination_pitch,
                   static_cast<const char *>(source), source_pitch, width, height, kind);
}

SHIM_API aclError aclrtMemcpy2dAsync(void *destination, size_t destination_pitch,
                                     const void *source, size_t source_pitch, size_t width,
                                     size_t height, aclrtMemcpyKind kind, aclrtStream stream) {
  graph_count_task(stream);
  return copy_rows("aclrtMemcpy2dAsync", static_cast<char *>(destination), destination_pitch,
                   static_cast<const char *>(source), source_pitch, width, height, kind);
}

SHIM_API aclError aclrtMemcpyBatch(void **destinations, size_t *rooms, void **sources,
                                   size_t *sizes, size_t count, aclrtMemcpyBatchAttr *, size_t *,
                                   size_t, size_t *failed) {
  for (size_t index = 0; index < count; ++index)
    if (aclError status = copy("aclrtMemcpyBatch", destinations[index], rooms[index],
                               sources[index], sizes[index], ACL_MEMCPY_DEFAULT)) {
      if (failed) *failed = index;
      return status;
    }
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtMemcpyBatchAsync(void **destinations, size_t *rooms, void **sources,
                                        size_t *sizes, size_t count,
                                        aclrtMemcpyBatchAttr *attributes, size_t *indexes,
                                        size_t attribute_count, size_t *failed,
                                        aclrtStream stream) {
  graph_count_task(stream);
  return aclrtMemcpyBatch(destinations, rooms, sources, sizes, count, attributes, indexes,
                          attribute_count, failed);
}

SHIM_API aclError aclrtMemset(void *pointer, size_t room, int32_t value, size_t bytes) {
  return fill("aclrtMemset", pointer, room, value, bytes);
}

SHIM_API aclError aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t bytes,
                                   aclrtStream stream) {
  graph_count_task(stream);
  return fill("aclrtMemsetAsync", pointer, room, value, bytes);
}

// A value write is visible at once, because everything before it on the stream has already
// happened.
SHIM_API aclError aclrtValueWrite(void *address, uint64_t value, uint32_t, aclrtStream) {
  bool on_device = false;
  if (aclError status = check_range("aclrtValueWrite", address, sizeof value, &on_device))
    return status;
  if (!on_device)
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWrite: %p is not device memory", address);
  poison_known(address, sizeof value);
  memcpy(address, &value, sizeof value);
  return ACL_SUCCESS;
}
