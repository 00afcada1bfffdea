// ATB's operators that torch_npu calls in two stages, as aclnn's: AtbXxxGetWorkspaceSize(...,
// uint64_t *size, atb::Operation **operation, atb::Context *context) and AtbXxx(workspace, size,
// operation, context). The caller keeps the operation for calls of the same arguments, or destroys
// it.
#pragma once

#include <cstdint>

#include "acl.h"

namespace memprof_sim {

// Whether this is an operation that was made here and not destroyed.
bool is_atb_operation(const void *operation);
// The first stage: makes the operation unless there is one already, and answers the workspace.
aclError plan_atb_operation(const char *name, uint64_t largest_tensor_bytes, uint64_t *bytes,
                            void **operation);

}  // namespace memprof_sim
