// Sizes in whole units, pages first of all.
#pragma once

#include <unistd.h>

#include <cstdint>

namespace memprof_sim {

// 4 KiB, on some kernels of aarch64 64 KiB.
inline uint64_t host_page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

inline uint64_t round_up(uint64_t value, uint64_t unit) {
  return unit ? (value + unit - 1) / unit * unit : value;
}

}  // namespace memprof_sim
