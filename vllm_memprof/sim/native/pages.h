// Sizes in whole units, pages first of all.
#pragma once

#include <cstdint>

namespace memprof_sim {

constexpr uint64_t kHostPageBytes = 4096;

inline uint64_t round_up(uint64_t value, uint64_t unit) {
  return unit ? (value + unit - 1) / unit * unit : value;
}

}  // namespace memprof_sim
