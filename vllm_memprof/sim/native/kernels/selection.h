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
