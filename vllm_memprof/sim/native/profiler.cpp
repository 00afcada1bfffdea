// Profiler interfaces that hand something back. Nothing is recorded: the simulated device has no
// activity to time.
#include "acl.h"
#include "clock.h"
#include "ownership.h"

using namespace memprof_sim;

SHIM_API uint64_t MsprofSysCycleTime() { return monotonic_ns(); }

SHIM_API uint64_t MsprofGetHashId(const char *text, size_t length) {
  uint64_t hash = 1469598103934665603ull;
  for (size_t index = 0; text && index < length; ++index)
    hash = (hash ^ static_cast<unsigned char>(text[index])) * 1099511628211ull;
  return hash;
}

SHIM_API uint64_t MsprofStr2Id(const char *text, size_t length) {
  return MsprofGetHashId(text, length);
}

using Events = decltype(memprof_sim::fourth_parameter(aclprofCreateConfig));

SHIM_API aclprofConfig *aclprofCreateConfig(uint32_t *, uint32_t, aclprofAicoreMetrics, Events,
                                            uint64_t) {
  return reinterpret_cast<aclprofConfig *>(hand_out<char>());
}

SHIM_API aclError aclprofDestroyConfig(const aclprofConfig *config) {
  take_back(reinterpret_cast<const char *>(config));
  return ACL_SUCCESS;
}

SHIM_API aclprofStepInfo *aclprofCreateStepInfo() {
  return reinterpret_cast<aclprofStepInfo *>(hand_out<char>());
}
SHIM_API void aclprofDestroyStepInfo(aclprofStepInfo *info) {
  take_back(reinterpret_cast<char *>(info));
}
