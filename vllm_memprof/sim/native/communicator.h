// HCCL communicators, for operators that name one.
#pragma once

#include "acl.h"

namespace memprof_sim {

// Takes the buffers of a communicator that an operator uses by name; true when the name is known.
bool communicator_touch_by_name(const char *name, aclError *status);

}  // namespace memprof_sim
