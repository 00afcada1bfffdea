// Initialisation, devices and contexts of this process.
#include "device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "accounting.h"
#include "error.h"
#include "ownership.h"
#include "profile.h"

namespace memprof_sim {
namespace {

struct Context {
  int device;
};

thread_local Context *current_context = nullptr;
std::atomic<int> default_device{-1};  // of the configuration given to aclInit; -1: none

std::vector<int> visible_devices() {
  std::vector<int> result;
  int count = static_cast<int>(profile().device_count);
  const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!list) {
    for (int device = 0; device < count; ++device) result.push_back(device);
    return result;
  }
  // As the runtime: the list ends at the first entry that is no device, or at another character;
  // one that does not ascend has none.
  for (const char *cursor = list; isdigit(static_cast<unsigned char>(*cursor));) {
    char *end = nullptr;
    long device = strtol(cursor, &end, 10);
    if (device >= count) break;
    if (!result.empty() && device <= result.back()) return {};
    result.push_back(static_cast<int>(device));
    if (*end != ',') break;
    cursor = end + 1;
  }
  return result;
}

struct DeviceState {
  std::mutex mutex;
  Context primary[kMaxDevices];
  int references[kMaxDevices] = {};  // aclrtSetDevice minus aclrtResetDevice
  bool charged[kMaxDevices] = {};    // the context baseline
  std::vector<int> visible = visible_devices();

  DeviceState() {
    for (int device = 0; device < kMaxDevices; ++device) primary[device].device = device;
    current_context = nullptr;  // a forked child has none
  }
};

// The threads of torch_npu's queues (NPUQueue.cpp::StartConsume names them, then sets the device).
// One with nothing to do sleeps.
constexpr char kLaunchingThread[] = "acl_thread";
constexpr unsigned long kTimerSlackNanoseconds = 1'000'000;
constexpr int kAwaitTries = 1000, kAwaitMicroseconds = 100;
struct Launching {
  std::mutex mutex;
  std::vector<int> threads;
};
Launching &launching() { return forked_state<Launching>(); }

int own_thread() { return static_cast<int>(syscall(SYS_gettid)); }

void note_launching_thread() {
  char name[16] = "";
  if (pthread_getname_np(pthread_self(), name, sizeof name) || strcmp(name, kLaunchingThread))
    return;
  std::lock_guard<std::mutex> guard(launching().mutex);
  auto &threads = launching().threads;
  if (std::find(threads.begin(), threads.end(), own_thread()) == threads.end())
    threads.push_back(own_thread());
}

bool is_running(int thread) {
  char thread_state = 0;
  return thread_start_time(getpid(), thread, &thread_state) && thread_state == 'R';
}

DeviceState &devices() { return forked_state<DeviceState>(); }
Registry<Context> &created_contexts() { return process_state<Registry<Context>>(); }

// CANN's names are in the process's own scope, whoever loaded the library: one preloaded before it
// finds them with RTLD_NEXT.
__attribute__((constructor)) void enter_global_scope() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void *>(&visible_devices), &self))
    dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
}

aclError check_profile() {
  if (profile().valid) return ACL_SUCCESS;
  static std::once_flag once;
  std::call_once(
      once, [] { fprintf(stderr, "[memprof simulated device] %s\n", profile().problem.c_str()); });
  return fail(ACL_ERROR_INVALID_FILE, "%s", profile().problem.c_str());
}

aclError charge_context(DeviceState &state, int device) {
  if (state.charged[device]) return ACL_SUCCESS;
  if (!account_available()) return ACL_ERROR_WRITE_FILE;
  if (!account_context(physical_device(device)))
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d has no memory left for a context",
                device);
  state.charged[device] = true;
  trace("context on device %d", device);
  return ACL_SUCCESS;
}

}  // namespace

// With a default device configured, whatever needs a context makes one there; asking which device
// is current does not.
int current_device() {
  if (!current_context && default_device >= 0) aclrtSetDevice(default_device);
  return current_context ? current_context->device : -1;
}

int visible_device_count() { return static_cast<int>(devices().visible.size()); }
bool device_valid(int device) { return device >= 0 && device < visible_device_count(); }
int physical_device(int device) {
  return device_valid(device) ? devices().visible[static_cast<size_t>(device)] : -1;
}

void await_launches() {
  std::vector<int> threads;
  {
    std::lock_guard<std::mutex> guard(launching().mutex);
    threads = launching().threads;
  }
  for (int thread : threads)
    for (int tries = 0; tries < kAwaitTries && thread != own_thread() && is_running(thread);
         ++tries)
      usleep(kAwaitMicroseconds);
}

void drop_device(int device, bool all_uses, void (*release)(int device)) {
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  int &references = state.references[device];
  bool last = references == 1 || all_uses;
  references = all_uses ? 0 : std::max(references - 1, 0);
  if (!last || !state.charged[device]) return;
  state.charged[device] = false;
  release(device);
}

}  // namespace memprof_sim

using namespace memprof_sim;

// Of the configuration file only {"defaultDevice": {"default_device": "N"}} means something here.
SHIM_API aclError aclInit(const char *path) {
  if (aclError status = check_profile()) return status;
  // Sleeps of this thread, and of those it starts, may end so much later: torch_npu's
  // release_thread looks every two microseconds whether operators are done, 17,000 times a second,
  // a tenth of a worker's processor time. Simulated operators are done at once.
  prctl(PR_SET_TIMERSLACK, kTimerSlackNanoseconds, 0, 0, 0);
  if (!path || !*path) return ACL_SUCCESS;
  std::ifstream input(path);
  if (!input) return fail(ACL_ERROR_INVALID_FILE, "aclInit: cannot read %s", path);
  std::string text((std::istreambuf_iterator<char>(input)), std::istreambuf_iterator<char>());
  size_t key = text.find("\"default_device\""), digit = text.find_first_of("0123456789", key);
  if (key != std::string::npos && digit != std::string::npos)
    default_device = atoi(text.c_str() + digit);
  return ACL_SUCCESS;
}

SHIM_API aclError aclFinalize() { return ACL_SUCCESS; }

SHIM_API aclError aclrtSetDevice(int32_t device) {
  if (aclError status = check_profile()) return status;
  note_launching_thread();
  if (!device_valid(device))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice: no device %d, %d are visible",
                device, visible_device_count());
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (aclError status = charge_context(state, device)) return status;
  ++state.references[device];
  current_context = &state.primary[device];
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetDevice(int32_t *device) {
  if (!device) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDevice: null argument");
  if (!current_context && default_device < 0)
    return ACL_ERROR_RT_CONTEXT_NULL;  // asked in passing: not worth a message
  *device = current_context ? current_context->device : default_device.load();
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetDeviceCount(uint32_t *count) {
  if (!count) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetDeviceCount: null argument");
  if (aclError status = check_profile()) return status;
  *count = static_cast<uint32_t>(visible_device_count());
  if (*count == 0) return fail(ACL_ERROR_RT_NO_DEVICE, "no device is visible");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
  if (!context || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtCreateContext: bad argument");
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (aclError status = charge_context(state, device)) return status;
  current_context = created_contexts().add(std::make_unique<Context>(Context{device}));
  *context = current_context;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtDestroyContext(aclrtContext context) {
  std::shared_ptr<Context> found = created_contexts().take(context);
  if (!found) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtDestroyContext: unknown context");
  if (current_context == found.get()) current_context = nullptr;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (!context) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetCurrentContext: null argument");
  if (current_device() < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = current_context;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSetCurrentContext(aclrtContext context) {
  auto *candidate = static_cast<Context *>(context);
  DeviceState &state = devices();
  bool primary = candidate >= state.primary && candidate < state.primary + kMaxDevices;
  if (!primary && !created_contexts().find(context))
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetCurrentContext: unknown context");
  current_context = candidate;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  if (!active || !device_valid(device))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetPrimaryCtxState: bad argument");
  DeviceState &state = devices();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (flags) *flags = 0;
  *active = state.charged[device] ? 1 : 0;
  return ACL_SUCCESS;
}
