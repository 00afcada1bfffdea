// Error codes with a message, and the trace that MEMPROF_SIM_TRACE asks for.
#pragma once

#include "acl.h"

namespace memprof_sim {

aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Names the function in aclGetRecentErrMsg and, once, on stderr.
aclError fail_unimplemented(const char *function);
bool tracing();
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace memprof_sim
