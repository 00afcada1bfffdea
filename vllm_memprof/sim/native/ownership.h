// Who owns the shim's objects: a registry those behind handles that can be checked, the caller of
// the C interface those that cannot, the process its state. Nothing else allocates or frees by
// hand.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace memprof_sim {

// The live objects behind opaque handles, so that a stale or foreign handle is an error and not a
// crash.
template <typename T>
class Registry {
 public:
  T *add(std::unique_ptr<T> object) {
    std::lock_guard<std::mutex> guard(mutex_);
    T *handle = object.get();
    live_[handle] = std::move(object);
    return handle;
  }
  std::shared_ptr<T> find(const void *handle) const {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = live_.find(handle);
    return found == live_.end() ? nullptr : found->second;
  }
  // The object without its place in the registry; null when there is none. It goes with its last
  // user.
  std::shared_ptr<T> take(const void *handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = live_.find(handle);
    if (found == live_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    live_.erase(found);
    return object;
  }
  std::vector<std::shared_ptr<T>> all() const {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::shared_ptr<T>> result;
    for (const auto &entry : live_) result.push_back(entry.second);
    return result;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const void *, std::shared_ptr<T>> live_;
};

// An object that the caller owns from here on, and that one CANN function gives back.
template <typename T, typename... Arguments>
T *hand_out(Arguments &&...arguments) {
  return std::make_unique<T>(std::forward<Arguments>(arguments)...).release();
}
template <typename T>
void take_back(const T *object) {
  std::unique_ptr<const T> owned(object);
}
// Likewise a copy of an array, which CANN's interface has the caller free with delete[].
template <typename T>
T *hand_out_array(const std::vector<T> &values) {
  auto copy = std::make_unique<T[]>(values.size() + 1);
  std::copy(values.begin(), values.end(), copy.get());
  return copy.release();
}

// The one T of this process. It is never destroyed: other libraries call in while the process
// exits.
template <typename T>
T &process_state() {
  static T *const state = hand_out<T>();
  return *state;
}

// The same, but a forked child begins with a fresh one, whatever the parent's threads were doing.
template <typename T>
T &forked_state() {
  static T *state = nullptr;
  static std::once_flag once;
  std::call_once(once, [] {
    state = hand_out<T>();
    pthread_atfork(nullptr, nullptr, [] { state = hand_out<T>(); });
  });
  return *state;
}

}  // namespace memprof_sim
