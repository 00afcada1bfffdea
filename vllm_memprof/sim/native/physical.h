// Physical memory apart from addresses.
#pragma once

#include <cstdint>

namespace memprof_sim {

void physical_forget_device(int device);  // after a device reset
// Where a pointer lies; false: no physical memory is mapped there. Results may be null.
bool physical_range(const void *pointer, uint64_t *bytes_left, int *device);
// Likewise of the host's physical memory; 0: none is mapped there.
uint64_t physical_of_host(const void *pointer);

}  // namespace memprof_sim
