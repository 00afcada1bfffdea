// The order of values that selection by value and the routing of experts share.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/number_formats.h"
#include "tensor.h"

namespace memprof_sim {

// The first `count` positions of a line in order; equal values in the order of their positions. NaN
// is larger than any number when values are ordered; a search for the least or largest finds it
// first either way. As in torch.
std::vector<int64_t> order(const std::vector<Value> &line, size_t count, bool descending,
                           bool nan_first);

// Fills the positions among a call's results with 0, for one that is not computed.
void zero_indices(Call &call);

}  // namespace memprof_sim
