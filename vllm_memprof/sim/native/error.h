// Error codes with a message, and the trace that MEMPROF_SIM_TRACE asks for.
#pragma once

#include "acl.h"

namespace memprof_sim {

aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Names the function in aclGetRecentErrMsg and, once, on stderr.
aclError fail_unimplemented(const char *function);
// Says on stderr, once in a process for each operator, what was answered without computing.
void note_answer(const char *operator_name, uint64_t tensor_bytes, const char *answer);
bool tracing();
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace memprof_sim
