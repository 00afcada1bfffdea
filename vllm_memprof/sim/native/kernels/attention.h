// What attention shares with ATB's operations.
#pragma once

#include "tensor.h"

namespace memprof_sim {

// rows[i] goes to slot slots[i] of a cache [blocks, block size, ...]; a negative slot is padding.
// Computed for small `rows` and `slots`.
void write_cache(const aclTensor &rows, const aclTensor &slots, const aclTensor &cache);

}  // namespace memprof_sim
