// Copies and fills of device memory within the profile's limit of kept bytes.
#pragma once

#include <cstdint>

namespace memprof_sim {

void keep_copy(void *destination, const void *source, uint64_t bytes, bool from_device);
void keep_set(void *destination, int value, uint64_t bytes);

}  // namespace memprof_sim
