// Workspace that follows from an operator's shapes, as the open operator library computes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct aclTensor;

namespace memprof_sim {

// The bytes that the tiling of that name asks for beside the base of a profile's rule. `tensors`:
// the operator's tensors in their order. 0 for a tiling that is not known.
uint64_t tiling_workspace_bytes(const std::string &tiling, const std::string &operator_name,
                                const std::vector<const aclTensor *> &tensors);

}  // namespace memprof_sim
