// Host functions and callbacks. Host functions run on a thread of the shim, in order. Callbacks run on the thread that
// subscribed to their stream, when it asks for them (aclrtProcessReport), as on the device.
#include "shim.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <thread>

namespace memprof_sim {
namespace {

struct Task {
  aclrtStream stream;
  std::function<void()> work;
};

struct Callbacks {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> host_functions;
  bool host_thread_started = false;
  std::map<uint64_t, std::deque<Task>> by_thread;  // queue of a subscribed thread
  std::map<aclrtStream, uint64_t> subscriber;
  std::map<aclrtStream, int> pending;  // host functions and callbacks not yet run
  int total_pending = 0;
};

Callbacks *callbacks_pointer = nullptr;

Callbacks &callbacks() {
  static std::once_flag once;
  std::call_once(once, [] {
    callbacks_pointer = new Callbacks;
    pthread_atfork(nullptr, nullptr, [] { callbacks_pointer = new Callbacks; });
  });
  return *callbacks_pointer;
}

void run(Callbacks &state, const Task &task) {
  task.work();
  std::lock_guard<std::mutex> guard(state.mutex);
  --state.pending[task.stream];
  --state.total_pending;
  state.changed.notify_all();
}

void host_thread(Callbacks *state) {
  for (;;) {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return !state->host_functions.empty(); });
    Task task = std::move(state->host_functions.front());
    state->host_functions.pop_front();
    lock.unlock();
    run(*state, task);
  }
}

void enqueue_host_function(aclrtStream stream, std::function<void()> work) {
  Callbacks &state = callbacks();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.host_thread_started) {
    std::thread(host_thread, &state).detach();
    state.host_thread_started = true;
  }
  state.host_functions.push_back({stream, std::move(work)});
  ++state.pending[stream];
  ++state.total_pending;
  state.changed.notify_all();
}

}  // namespace

void stream_wait(aclrtStream stream) {
  Callbacks &state = callbacks();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.changed.wait(lock, [&] {
    auto found = state.pending.find(stream);
    return found == state.pending.end() || found->second == 0;
  });
}

void wait_all_streams() {
  Callbacks &state = callbacks();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.changed.wait(lock, [&] { return state.total_pending == 0; });
}

void stream_forget(aclrtStream stream) {
  Callbacks &state = callbacks();
  std::lock_guard<std::mutex> guard(state.mutex);
  state.pending.erase(stream);
  state.subscriber.erase(stream);
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *arguments) {
  if (!function || !stream_known(stream)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtLaunchHostFunc: bad argument");
  auto work = [function, arguments] { function(arguments); };
  if (capture_record(stream, [stream, work] { enqueue_host_function(stream, work); })) return ACL_SUCCESS;
  enqueue_host_function(stream, work);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
  if (!stream_known(stream)) return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtSubscribeReport: unknown stream %p", stream);
  Callbacks &state = callbacks();
  std::lock_guard<std::mutex> guard(state.mutex);
  auto found = state.subscriber.find(stream);
  if (found != state.subscriber.end()) return fail(ACL_ERROR_REPEAT_SUBSCRIBE, "aclrtSubscribeReport: the stream has a subscriber");
  state.subscriber[stream] = thread;
  state.by_thread[thread];
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) {
  Callbacks &state = callbacks();
  std::lock_guard<std::mutex> guard(state.mutex);
  auto found = state.subscriber.find(stream);
  if (found == state.subscriber.end() || found->second != thread)
    return fail(ACL_ERROR_STREAM_NOT_SUBSCRIBE, "aclrtUnSubscribeReport: this thread did not subscribe to the stream");
  state.subscriber.erase(found);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType, aclrtStream stream) {
  if (!function || !stream_known(stream)) return fail(ACL_ERROR_INVALID_PARAM, "aclrtLaunchCallback: bad argument");
  Callbacks &state = callbacks();
  std::lock_guard<std::mutex> guard(state.mutex);
  auto found = state.subscriber.find(stream);
  if (found == state.subscriber.end())
    return fail(ACL_ERROR_RT_STREAM_NO_CB_REG, "aclrtLaunchCallback: no thread subscribed to the stream");
  state.by_thread[found->second].push_back({stream, [function, data] { function(data); }});
  ++state.pending[stream];
  ++state.total_pending;
  state.changed.notify_all();
  return ACL_SUCCESS;
}

// The subscriber's id is a pthread_t or a kernel thread id, by the caller's choice.
SHIM_API aclError aclrtProcessReport(int32_t timeout_ms) {
  Callbacks &state = callbacks();
  uint64_t candidates[] = {static_cast<uint64_t>(pthread_self()), static_cast<uint64_t>(syscall(SYS_gettid))};
  std::deque<Task> *queue = nullptr;
  std::unique_lock<std::mutex> lock(state.mutex);
  auto ready = [&] {
    for (uint64_t thread : candidates) {
      auto found = state.by_thread.find(thread);
      if (found == state.by_thread.end()) continue;
      queue = &found->second;
      if (!queue->empty()) return true;
    }
    return false;
  };
  bool got = true;
  if (timeout_ms < 0)
    state.changed.wait(lock, ready);
  else
    got = state.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), ready);
  if (!got) return queue ? ACL_ERROR_RT_REPORT_TIMEOUT : ACL_ERROR_RT_THREAD_SUBSCRIBE;
  Task task = std::move(queue->front());
  queue->pop_front();
  lock.unlock();
  run(state, task);
  return ACL_SUCCESS;
}
