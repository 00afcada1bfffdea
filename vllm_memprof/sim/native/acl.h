// CANN's own declarations, and how the shim exports a name. Every exported name is one of CANN's;
// everything else lives in namespace memprof_sim. Exported functions return ACL or HCCL codes and
// never throw.
#pragma once

#pragma GCC visibility push(default)
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_prof.h>
#include <hccl/hccl.h>
#pragma GCC visibility pop

#include "compat.h"

#include <cstddef>
#include <cstdint>

#define SHIM_API extern "C" __attribute__((visibility("default")))
// Called by the generated names only.
#define SHIM_INTERNAL extern "C" __attribute__((visibility("hidden")))
