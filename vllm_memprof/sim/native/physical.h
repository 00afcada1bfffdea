// Physical memory apart from addresses.
#pragma once

#include <cstdint>

namespace memprof_sim {

void physical_forget_device(int device);  // after a device reset
// Where a pointer lies; false: no physical memory is mapped there. Results may be null.
bool physical_range(const void *pointer, uint64_t *bytes_left, int *device);
// Whether it is physical memory of the host, mapped here.
bool physical_of_host(const void *pointer);

}  // namespace memprof_sim
