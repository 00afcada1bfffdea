// The clock of events and profiler stamps.
#pragma once

#include <time.h>

#include <cstdint>

namespace memprof_sim {

inline uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace memprof_sim
