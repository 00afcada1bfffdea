// Device memory: a device byte is a byte of lazily mapped host memory.
#pragma once

#include "accounting.h"
#include "acl.h"

namespace memprof_sim {

aclError device_allocate(void **pointer, uint64_t bytes, Component component);
aclError device_free(void *pointer);
void memory_forget_device(int device);  // after a device reset
// Where a pointer lies, physical memory included; false: not device memory. Results may be null.
bool device_range(const void *pointer, uint64_t *bytes_left, int *device);
// Likewise in host memory that was allocated or registered here (pinned).
bool host_range(const void *pointer, uint64_t *bytes_left);

}  // namespace memprof_sim
