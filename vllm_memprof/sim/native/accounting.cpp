// Device memory accounting shared by every process that maps the same state file.
//
// One slot per (process, device) holds bytes by component. A slot belongs to a pid and its start
// time, so that a process that died, by whatever signal, loses its memory as soon as anybody looks,
// also when its pid is used again. Changes happen under one robust mutex in the file: the kernel
// releases it when its holder is killed. What a torn update left behind belongs to a dead process
// and goes with its slot.
#include "accounting.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <unordered_set>

#include "error.h"
#include "ownership.h"
#include "pages.h"
#include "profile.h"

namespace memprof_sim {

uint64_t thread_start_time(pid_t pid, pid_t thread, char *thread_state) {
  char path[64], buffer[1024];
  snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, thread);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t got = read(fd, buffer, sizeof buffer - 1);
  close(fd);
  if (got <= 0) return 0;
  buffer[got] = 0;
  char *field = strrchr(buffer, ')');  // the name may hold spaces and parentheses
  if (!field) return 0;
  *thread_state = field[2];
  unsigned long long start = 0;
  field += 2;
  for (int skip = 0; skip < 19 && field; ++skip) field = strchr(field + 1, ' ');
  if (field) sscanf(field, "%llu", &start);
  return start;
}

namespace {

constexpr uint64_t kMagic = 0x314d4953504d454dull;  // "MEMPSIM1"
constexpr uint32_t kVersion = 3;
constexpr uint32_t kSlots = 1024;
constexpr uint32_t kShares = 8192;

struct Slot {
  int32_t pid;  // 0: free
  int32_t device;
  uint64_t start_time;  // of the process, in clock ticks since boot
  std::atomic<uint64_t> current[kComponentCount];
  std::atomic<uint64_t> peak[kComponentCount];
  std::atomic<uint64_t> counted[kCountedCount];
};

struct Share {
  SharedHandle handle;  // key 0: free
  uint64_t start_time;
};

struct State {
  std::atomic<uint64_t> magic;  // written last
  uint32_t version;
  uint32_t bytes;
  char boot_id[40];
  pthread_mutex_t mutex;
  Slot slots[kSlots];
  Share shares[kShares];
};

State *state = nullptr;
std::mutex open_mutex;
int own_slot[kMaxDevices];  // slot index by device, -1: none; valid in the process that set own_pid
uint64_t runtime_shares[kMaxDevices], runtime_charged[kMaxDevices];  // of account_runtime_share
std::atomic<bool> kernels_loaded[kMaxDevices];
struct Binaries {
  std::mutex mutex;                                     // taken before that of the state
  std::unordered_set<std::string> loaded[kMaxDevices];  // operators, by name
};
Binaries &binaries() { return forked_state<Binaries>(); }
pid_t own_pid = 0;
uint64_t own_start = 0;

bool alive(int32_t pid, uint64_t start_time) {
  if (pid == own_pid && start_time == own_start) return true;
  char process_state = 0;
  uint64_t start = thread_start_time(pid, pid, &process_state);
  return start == start_time && process_state != 'Z' && process_state != 'X';
}

void clear(Slot *slot) {
  slot->pid = 0;
  for (auto &value : slot->current) value.store(0);
  for (auto &value : slot->peak) value.store(0);
  for (auto &value : slot->counted) value.store(0);
}

struct Locked {
  Locked() {
    if (pthread_mutex_lock(&state->mutex) == EOWNERDEAD) pthread_mutex_consistent(&state->mutex);
  }
  ~Locked() { pthread_mutex_unlock(&state->mutex); }
};

void reclaim_dead() {
  int32_t known_alive = 0;
  uint64_t known_start = 0;
  for (Slot &slot : state->slots) {
    if (!slot.pid || (slot.pid == known_alive && slot.start_time == known_start)) continue;
    if (alive(slot.pid, slot.start_time)) {
      known_alive = slot.pid;
      known_start = slot.start_time;
    } else {
      trace("reclaiming the memory of dead process %d on device %d", slot.pid, slot.device);
      clear(&slot);
    }
  }
}

void boot_id(char *target, size_t size) {
  memset(target, 0, size);
  int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  if (read(fd, target, size - 1) < 0) target[0] = 0;
  close(fd);
}

std::string state_path() {
  const char *path = getenv("MEMPROF_SIM_STATE");
  if (path && *path) return path;
  return "/dev/shm/memprof-sim-" + std::to_string(getuid()) + "-" + profile().name;
}

void initialise(State *fresh) {
  memset(static_cast<void *>(fresh), 0, sizeof *fresh);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&fresh->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  fresh->version = kVersion;
  fresh->bytes = sizeof(State);
  boot_id(fresh->boot_id, sizeof fresh->boot_id);
  fresh->magic.store(kMagic);
}

bool usable(const State *candidate) {
  char boot[40];
  boot_id(boot, sizeof boot);
  return candidate->magic.load() == kMagic && candidate->version == kVersion &&
         candidate->bytes == sizeof(State) && memcmp(candidate->boot_id, boot, sizeof boot) == 0;
}

void forget_own_slots() {
  for (int &index : own_slot) index = -1;
  for (uint64_t &bytes : runtime_shares) bytes = 0;
  for (uint64_t &bytes : runtime_charged) bytes = 0;
  for (auto &loaded : kernels_loaded) loaded = false;
}

void after_fork_in_child() {
  // The child inherits no device memory: what the parent holds stays the parent's.
  own_pid = getpid();
  char ignored;
  own_start = thread_start_time(own_pid, own_pid, &ignored);
  forget_own_slots();
}

__attribute__((destructor)) void release_at_exit() {
  if (!state || own_pid != getpid()) return;
  Locked guard;
  for (int &index : own_slot)
    if (index >= 0) {
      clear(&state->slots[index]);
      index = -1;
    }
}

bool attach() {
  std::lock_guard<std::mutex> guard(open_mutex);
  if (state) return true;
  if (!profile().valid) return false;
  std::string path = state_path();
  // Its folder may be one that others write to: no link, no pipe, nobody else's file.
  int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  struct stat info{};
  if (fd >= 0 && (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode) || info.st_uid != geteuid() ||
                  fchmod(fd, 0600) < 0)) {
    close(fd);
    fd = -1;
    errno = EPERM;
  }
  if (fd < 0) {
    const char *why = errno == ELOOP   ? "it is a symbolic link"
                      : errno == EPERM ? "it is not a regular file of this user"
                                       : strerror(errno);
    fail(ACL_ERROR_WRITE_FILE, "cannot open the state file %s: %s", path.c_str(), why);
    return false;
  }
  flock(fd, LOCK_EX);
  fstat(fd, &info);
  bool sized =
      info.st_size == static_cast<off_t>(sizeof(State)) || ftruncate(fd, sizeof(State)) == 0;
  void *mapped =
      sized ? mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  if (mapped == MAP_FAILED) {
    fail(ACL_ERROR_WRITE_FILE, "cannot map the state file %s: %s", path.c_str(), strerror(errno));
    close(fd);
    return false;
  }
  State *candidate = static_cast<State *>(mapped);
  if (!usable(candidate)) initialise(candidate);
  flock(fd, LOCK_UN);
  close(fd);
  own_pid = getpid();
  char ignored;
  own_start = thread_start_time(own_pid, own_pid, &ignored);
  forget_own_slots();
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  state = candidate;
  return true;
}

uint64_t used_locked(int device) {
  uint64_t used = 0;
  for (const Slot &slot : state->slots)
    if (slot.pid && slot.device == device)
      for (const auto &value : slot.current) used += value.load(std::memory_order_relaxed);
  return used;
}

Slot *slot_locked(int device, bool create) {
  if (device < 0 || device >= kMaxDevices) return nullptr;
  if (own_slot[device] >= 0) return &state->slots[own_slot[device]];
  if (!create) return nullptr;
  for (uint32_t index = 0; index < kSlots; ++index) {
    Slot &slot = state->slots[index];
    if (slot.pid) continue;
    clear(&slot);
    slot.device = device;
    slot.start_time = own_start;
    slot.pid = own_pid;
    own_slot[device] = static_cast<int>(index);
    return &slot;
  }
  return nullptr;
}

bool charge_locked(int device, Component component, uint64_t bytes) {
  reclaim_dead();
  if (used_locked(device) + bytes > total_bytes_of(device)) return false;
  Slot *slot = slot_locked(device, true);
  if (!slot) return false;
  uint64_t now = slot->current[component].fetch_add(bytes) + bytes;
  if (now > slot->peak[component].load()) slot->peak[component].store(now);
  return true;
}

void release_locked(int device, Component component, uint64_t bytes) {
  Slot *slot = slot_locked(device, false);
  if (!slot) return;
  uint64_t held = slot->current[component].load();
  slot->current[component].store(held > bytes ? held - bytes : 0);
}

}  // namespace

const char *component_name(int component) {
  static const char *const names[kComponentCount] = {"DEVICE", "APP", "HCCL", "RUNTIME"};
  return component >= 0 && component < kComponentCount ? names[component] : "?";
}

bool account_available() { return attach(); }

bool account_charge(int device, Component component, uint64_t bytes) {
  if (!attach()) return false;
  Locked guard;
  return charge_locked(device, component, bytes);
}

bool account_context(int device) {
  if (!attach()) return false;
  Locked guard;
  reclaim_dead();
  bool first = true;
  for (const Slot &slot : state->slots)
    first &= !slot.pid || slot.device != device || !slot.current[kDevice].load();
  uint64_t total = first ? profile().context_bytes : profile().further_context_bytes;
  uint64_t runtime = std::min(profile().context_runtime_bytes, total);
  if (!charge_locked(device, kDevice, total - runtime)) return false;
  if (charge_locked(device, kRuntime, runtime)) {
    ++slot_locked(device, true)->counted[kStreams];  // the default stream
    return true;
  }
  release_locked(device, kDevice, total - runtime);
  return false;
}

void account_release(int device, Component component, uint64_t bytes) {
  if (!attach()) return;
  Locked guard;
  release_locked(device, component, bytes);
}

bool account_runtime_share(int device, int64_t delta) {
  if (device < 0 || device >= kMaxDevices || !attach()) return false;
  Locked guard;
  uint64_t shares = runtime_shares[device] + static_cast<uint64_t>(delta);
  uint64_t wanted = round_up(shares, profile().huge_page_bytes), held = runtime_charged[device];
  if (wanted > held && !charge_locked(device, kRuntime, wanted - held)) return false;
  if (wanted < held) release_locked(device, kRuntime, held - wanted);
  runtime_shares[device] = shares;
  runtime_charged[device] = wanted;
  return true;
}

bool account_kernels(int device, const std::string &operator_name) {
  if (device < 0 || device >= kMaxDevices) return true;
  if (uint64_t bytes = profile().operator_binary_bytes) {
    std::lock_guard<std::mutex> lock(binaries().mutex);
    auto &names = binaries().loaded[device];
    if (!names.count(operator_name)) {
      if (!account_runtime_share(device, static_cast<int64_t>(bytes))) return false;
      names.insert(operator_name);
    }
  }
  if (!profile().kernels_bytes || kernels_loaded[device] || !workspace_rule_for(operator_name))
    return true;
  if (kernels_loaded[device].exchange(true)) return true;
  if (account_charge(device, kRuntime,
                     round_up(profile().kernels_bytes, profile().huge_page_bytes)))
    return true;
  kernels_loaded[device] = false;
  return false;
}

bool account_take(int device, Counted what) {
  static const bool asked[kCountedCount] = {limit_asked("streams"), limit_asked("events")};
  if (!asked[what]) return true;
  if (!attach()) return false;
  Locked guard;
  reclaim_dead();
  uint64_t taken = 0;
  for (const Slot &slot : state->slots)
    if (slot.pid && slot.device == device) taken += slot.counted[what].load();
  uint64_t most = what == kStreams ? profile().stream_count : profile().event_count;
  Slot *slot = !most || taken < most ? slot_locked(device, true) : nullptr;
  if (slot) ++slot->counted[what];
  return slot != nullptr;
}

void account_give_back(int device, Counted what, uint64_t count) {
  if (!count || !attach()) return;
  Locked guard;
  if (Slot *slot = slot_locked(device, false))
    slot->counted[what] -= std::min(count, slot->counted[what].load());
}

void account_release_device(int device) {
  if (!attach()) return;
  std::lock_guard<std::mutex> lock(binaries().mutex);
  Locked guard;
  Slot *slot = slot_locked(device, false);
  if (!slot) return;
  clear(slot);
  own_slot[device] = -1;
  runtime_shares[device] = runtime_charged[device] = 0;
  kernels_loaded[device] = false;
  binaries().loaded[device].clear();
}

uint64_t account_device_used(int device) {
  if (!attach()) return 0;
  Locked guard;
  reclaim_dead();
  return used_locked(device);
}

Usage account_own_usage(int device) {
  Usage result{};
  if (!attach()) return result;
  Locked guard;
  Slot *slot = slot_locked(device, false);
  if (!slot) return result;
  for (int component = 0; component < kComponentCount; ++component) {
    result.current[component] = slot->current[component].load();
    result.peak[component] = slot->peak[component].load();
  }
  return result;
}

std::vector<ProcessUsage> account_processes(int device) {
  std::vector<ProcessUsage> result;
  if (!attach()) return result;
  Locked guard;
  reclaim_dead();
  for (const Slot &slot : state->slots) {
    if (!slot.pid || slot.device != device) continue;
    uint64_t bytes = 0;
    for (const auto &value : slot.current) bytes += value.load();
    result.push_back({slot.pid, bytes});
  }
  return result;
}

uint64_t share_key() {
  std::random_device source;
  return (static_cast<uint64_t>(source()) << 32 | source()) | 1;
}

int share_open(const SharedHandle &handle) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  return open(path, O_RDWR | O_CLOEXEC);
}

bool share_publish(const SharedHandle &handle) {
  if (!attach()) return false;
  Locked guard;
  Share *free_entry = nullptr;
  for (Share &share : state->shares) {
    if (share.handle.key == handle.key) return true;
    if (!free_entry && (!share.handle.key || !alive(share.handle.pid, share.start_time)))
      free_entry = &share;
  }
  if (!free_entry) return false;
  free_entry->handle = handle;
  free_entry->start_time = own_start;
  return true;
}

bool share_find(uint64_t key, SharedHandle *handle) {
  if (!attach() || !key) return false;
  Locked guard;
  for (const Share &share : state->shares)
    if (share.handle.key == key && alive(share.handle.pid, share.start_time)) {
      *handle = share.handle;
      return true;
    }
  return false;
}

void share_forget(uint64_t key) {
  if (!attach() || !key) return;
  Locked guard;
  for (Share &share : state->shares)
    if (share.handle.key == key && share.handle.pid == own_pid) share.handle.key = 0;
}

}  // namespace memprof_sim
