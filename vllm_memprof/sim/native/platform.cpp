// Platform queries and the small C libraries that come with CANN.
#define _GLIBCXX_USE_CXX11_ABI 0  // the names are mangled with the older std::string
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#define VISIBLE __attribute__((visibility("default")))
#define SHIM_API extern "C" VISIBLE

extern "C" {
uint64_t memprof_sim_profile_ai_cores() __attribute__((visibility("hidden")));
uint64_t memprof_sim_profile_l2_bytes() __attribute__((visibility("hidden")));
uint64_t memprof_sim_profile_total_bytes() __attribute__((visibility("hidden")));
int memprof_sim_unimplemented(const char *function) __attribute__((visibility("hidden")));
}

// Declared as the linked names demand; CANN ships no header for them in the wheel.
namespace fe {

enum class LocalMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM };

class PlatFormInfos {
 public:
  VISIBLE uint32_t GetCoreNum() const;
  VISIBLE void SetCoreNumByCoreType(const std::string &type);
  VISIBLE void GetLocalMemSize(const LocalMemType &type, uint64_t &bytes);
  VISIBLE void GetLocalMemBw(const LocalMemType &type, uint64_t &bandwidth);
  VISIBLE bool GetPlatformResWithLock(const std::string &label, const std::string &key,
                                      std::string &value);
};

class PlatformInfoManager {
 public:
  VISIBLE static PlatformInfoManager &Instance();
  VISIBLE uint32_t InitRuntimePlatformInfos(const std::string &soc);
  VISIBLE uint32_t GetRuntimePlatformInfosByDevice(const uint32_t &device, PlatFormInfos &infos,
                                                   bool need_deep_copy);
};

uint32_t PlatFormInfos::GetCoreNum() const {
  return static_cast<uint32_t>(memprof_sim_profile_ai_cores());
}
void PlatFormInfos::SetCoreNumByCoreType(const std::string &) {}

void PlatFormInfos::GetLocalMemSize(const LocalMemType &type, uint64_t &bytes) {
  switch (type) {  // of the 910B's cores; only tiling code asks
    case LocalMemType::L0_A:
    case LocalMemType::L0_B: bytes = 64 << 10; break;
    case LocalMemType::L0_C: bytes = 128 << 10; break;
    case LocalMemType::L1: bytes = 512 << 10; break;
    case LocalMemType::L2: bytes = memprof_sim_profile_l2_bytes(); break;
    case LocalMemType::UB: bytes = 192 << 10; break;
    default: bytes = memprof_sim_profile_total_bytes();
  }
}

void PlatFormInfos::GetLocalMemBw(const LocalMemType &, uint64_t &bandwidth) { bandwidth = 1; }

bool PlatFormInfos::GetPlatformResWithLock(const std::string &, const std::string &,
                                           std::string &) {
  memprof_sim_unimplemented("fe::PlatFormInfos::GetPlatformResWithLock");
  return false;
}

PlatformInfoManager &PlatformInfoManager::Instance() {
  static PlatformInfoManager instance;
  return instance;
}

uint32_t PlatformInfoManager::InitRuntimePlatformInfos(const std::string &) { return 0; }
uint32_t PlatformInfoManager::GetRuntimePlatformInfosByDevice(const uint32_t &, PlatFormInfos &,
                                                              bool) {
  return 0;
}

}  // namespace fe

SHIM_API int mmGetTid() { return static_cast<int>(syscall(SYS_gettid)); }

// Logging: no level is enabled, so that callers do not format what nobody reads.
SHIM_API int32_t CheckLogLevel(int32_t, int32_t) { return 0; }

// Of the bounds-checking C library.
SHIM_API int strcpy_s(char *destination, size_t room, const char *source) {
  if (!destination || !source || room == 0) return 22;  // EINVAL
  size_t length = strlen(source);
  if (length >= room) {
    destination[0] = 0;
    return 34;  // ERANGE
  }
  memcpy(destination, source, length + 1);
  return 0;
}
