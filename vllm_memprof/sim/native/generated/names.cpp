// The names that no other file defines. names.inc, which the builder writes, has a row for every
// name that the engine's binaries ask for: its state, which is a macro here, and what that needs.
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))
#define SHIM extern "C" __attribute__((visibility("hidden")))

SHIM int memprof_sim_unimplemented(const char *function);

#define IMPLEMENTED(name)
#define ABSENT(name)
#define NOOP(name) \
  API int name() { return 0; }
#define FAILING(name) \
  API int name() { return memprof_sim_unimplemented(#name); }
#define FAILING_NULL(name)            \
  API void *name() {                  \
    memprof_sim_unimplemented(#name); \
    return nullptr;                   \
  }
#define ATB(name, target, family)                     \
  SHIM uint64_t target(void *, void *, const char *); \
  API uint64_t name(void *first, void *second) { return target(first, second, family); }
// Entry points of operators: operators.S.
#define OPERATOR(name, operation, index)
#define RUN(name)
#define RUN_ATB(name)
#include <names.inc>

#undef NOOP
#undef FAILING
#undef FAILING_NULL
#undef ATB
#undef OPERATOR
#define NOOP(name)
#define FAILING(name)
#define FAILING_NULL(name)
#define ATB(name, target, family)
#define OPERATOR(name, operation, index) #operation,
/// Operators by the index that the entry point of their first stage hands on.
SHIM const char *const memprof_sim_aclnn_names[] = {
#include <names.inc>
    nullptr};
