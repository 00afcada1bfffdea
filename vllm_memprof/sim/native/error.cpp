// Error reporting: the message behind aclGetRecentErrMsg is per thread, as in ACL.
#include "error.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

#include "ownership.h"

namespace memprof_sim {
namespace {

struct ThreadError {
  std::string pending;    // set by the last failing call
  std::string delivered;  // what aclGetRecentErrMsg returned last; stays valid until the next call
  aclError last = ACL_SUCCESS;
};

// Functions of which stderr has a line already.
struct Reported {
  std::mutex mutex;
  std::set<std::string> functions;
};

ThreadError &thread_error() {
  static thread_local ThreadError error;
  return error;
}

std::string formatted(const char *format, va_list arguments) {
  char buffer[1024];
  vsnprintf(buffer, sizeof buffer, format, arguments);
  return buffer;
}

}  // namespace

aclError fail(aclError code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string message = formatted(format, arguments);
  va_end(arguments);
  thread_error().pending =
      "[memprof simulated device] " + message + " (error " + std::to_string(code) + ")";
  thread_error().last = code;
  trace("%s", thread_error().pending.c_str());
  return code;
}

void note_answer(const char *operator_name, uint64_t tensor_bytes, const char *answer) {
  auto &reported = process_state<Reported>();
  std::lock_guard<std::mutex> guard(reported.mutex);
  if (reported.functions.insert(operator_name).second)
    fprintf(
        stderr,
        "[memprof simulated device] aclnn%s of tensors of %llu bytes is not computed; answered: "
        "%s (pid %d)\n",
        operator_name, static_cast<unsigned long long>(tensor_bytes), answer, getpid());
}

aclError fail_unimplemented(const char *function) {
  {
    auto &reported = process_state<Reported>();
    std::lock_guard<std::mutex> guard(reported.mutex);
    if (reported.functions.insert(function).second)
      fprintf(stderr, "[memprof simulated device] %s is not implemented: the call fails (pid %d)\n",
              function, getpid());
  }
  return fail(ACL_ERROR_FEATURE_UNSUPPORTED, "%s is not implemented by the simulated device",
              function);
}

bool tracing() {
  static const bool on = getenv("MEMPROF_SIM_TRACE") != nullptr;
  return on;
}

void trace(const char *format, ...) {
  if (!tracing()) return;
  va_list arguments;
  va_start(arguments, format);
  std::string message = formatted(format, arguments);
  va_end(arguments);
  fprintf(stderr, "[sim %d] %s\n", getpid(), message.c_str());
}

}  // namespace memprof_sim

using namespace memprof_sim;

// Called by the generated stubs of functions that have no implementation.
SHIM_INTERNAL int memprof_sim_unimplemented(const char *function) {
  return fail_unimplemented(function);
}

SHIM_API const char *aclGetRecentErrMsg() {
  ThreadError &error = thread_error();
  error.delivered.swap(error.pending);
  error.pending.clear();
  return error.delivered.c_str();
}

SHIM_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return thread_error().last; }

SHIM_API aclError aclrtGetLastError(aclrtLastErrLevel) {
  aclError last = thread_error().last;
  thread_error().last = ACL_SUCCESS;
  return last;
}
