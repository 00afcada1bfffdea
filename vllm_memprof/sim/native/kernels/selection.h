// The order of values that selection by value and the routing of experts share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/number_formats.h"
#include "tensor.h"

namespace memprof_sim {

// Numbers that lie evenly between 0 and 1, as `rand` has them, each in a slot of its own: in order
// without being compared. False where they do not.
template <typename T>
inline bool in_slots(const std::vector<T> &line, size_t count, bool descending,
                     std::vector<int64_t> *order) {
  if (count < line.size()) return false;
  std::vector<int64_t> slots(line.size(), -1);
  for (size_t at = 0; at < line.size(); ++at) {
    if (!(line[at] >= 0 && line[at] < 1)) return false;
    size_t slot = static_cast<size_t>(line[at] * static_cast<T>(line.size()));
    if (slot >= slots.size() || slots[slot] >= 0) return false;
    slots[slot] = static_cast<int64_t>(at);
  }
  if (descending) std::reverse(slots.begin(), slots.end());
  *order = std::move(slots);
  return true;
}

// The first `count` positions of a line in order; equal values in the order of their positions. NaN
// is larger than any number when values are ordered; a search for the least or largest finds it
// first either way. As in torch.
template <typename T>
inline std::vector<int64_t> order(const std::vector<T> &line, size_t count, bool descending,
                                  bool nan_first) {
  std::vector<int64_t> positions(line.size());
  std::iota(positions.begin(), positions.end(), 0);
  auto first = [&](int64_t left, int64_t right) {
    T a = line[static_cast<size_t>(left)], b = line[static_cast<size_t>(right)];
    if (std::isnan(a) || std::isnan(b)) {
      if (std::isnan(a) != std::isnan(b)) return std::isnan(a) == nan_first;
    } else if (a != b) {
      return descending ? a > b : a < b;
    }
    return left < right;
  };
  if (in_slots(line, count, descending, &positions)) return positions;
  if (count < positions.size()) {
    std::partial_sort(positions.begin(), positions.begin() + static_cast<int64_t>(count),
                      positions.end(), first);
    positions.resize(count);
  } else if (!std::is_sorted(positions.begin(), positions.end(), first)) {
    std::sort(positions.begin(), positions.end(), first);
  }
  return positions;
}

// A step that meets all of `positions`, about the share of them that the golden ratio gives: any
// number of steps are spread evenly.
int64_t even_step(int64_t positions);

// Answers orders (as many positions as there are) or choices of `positions` along `axis` whose
// values nobody computed: each row goes on at another position, so that over all rows every one is
// chosen equally often, as by a random choice on average. Also above the limit of computing: what
// is chosen steers sizes.
void spread_choices(const aclTensor &chosen, size_t axis, int64_t positions);

// Fills the positions among a call's results with 0, for one that is not computed.
void zero_indices(Call &call);

}  // namespace memprof_sim
