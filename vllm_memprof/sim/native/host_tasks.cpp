// The queues of host functions and callbacks. Host functions run on a thread of the shim, in order;
// callbacks on the thread that subscribed to their stream, as on the device.
#include "host_tasks.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "ownership.h"

namespace memprof_sim {
namespace {

struct Task {
  aclrtStream stream;
  std::function<void()> work;
};

struct HostTasks {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> host_functions;
  bool host_thread_started = false;
  std::map<uint64_t, std::deque<Task>> by_thread;  // queue of a subscribed thread
  std::map<aclrtStream, uint64_t> subscriber;
  std::map<aclrtStream, int> pending;  // host functions and callbacks not yet run
  int total_pending = 0;

  void submit_locked(std::deque<Task> *queue, Task task) {
    ++pending[task.stream];
    ++total_pending;
    queue->push_back(std::move(task));
    changed.notify_all();
  }
  // Runs the first task of a queue; the lock is released on the way.
  void run_first(std::deque<Task> *queue, std::unique_lock<std::mutex> lock) {
    Task task = std::move(queue->front());
    queue->pop_front();
    lock.unlock();
    task.work();
    lock.lock();
    --pending[task.stream];
    --total_pending;
    changed.notify_all();
  }
};

HostTasks &tasks() { return forked_state<HostTasks>(); }

[[noreturn]] void run_host_functions(HostTasks *state) {
  for (;;) {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return !state->host_functions.empty(); });
    state->run_first(&state->host_functions, std::move(lock));
  }
}

}  // namespace

void enqueue_host_function(aclrtStream stream, std::function<void()> work) {
  HostTasks &state = tasks();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.host_thread_started) {
    std::thread(run_host_functions, &state).detach();
    state.host_thread_started = true;
  }
  state.submit_locked(&state.host_functions, {stream, std::move(work)});
}

bool subscribe(uint64_t thread, aclrtStream stream) {
  HostTasks &state = tasks();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.subscriber.emplace(stream, thread).second) return false;
  state.by_thread[thread];
  return true;
}

bool unsubscribe(uint64_t thread, aclrtStream stream) {
  HostTasks &state = tasks();
  std::lock_guard<std::mutex> guard(state.mutex);
  auto found = state.subscriber.find(stream);
  if (found == state.subscriber.end() || found->second != thread) return false;
  state.subscriber.erase(found);
  return true;
}

bool enqueue_callback(aclrtStream stream, std::function<void()> work) {
  HostTasks &state = tasks();
  std::lock_guard<std::mutex> guard(state.mutex);
  auto found = state.subscriber.find(stream);
  if (found == state.subscriber.end()) return false;
  state.submit_locked(&state.by_thread[found->second], {stream, std::move(work)});
  return true;
}

Processed process_callback(int32_t timeout_ms) {
  HostTasks &state = tasks();
  const uint64_t own_ids[] = {static_cast<uint64_t>(pthread_self()),
                              static_cast<uint64_t>(syscall(SYS_gettid))};
  std::deque<Task> *queue = nullptr;
  std::unique_lock<std::mutex> lock(state.mutex);
  auto ready = [&] {
    for (uint64_t thread : own_ids) {
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
  if (!got) return queue ? Processed::kTimeout : Processed::kNotSubscribed;
  state.run_first(queue, std::move(lock));
  return Processed::kOne;
}

void wait_for_stream(aclrtStream stream) {
  HostTasks &state = tasks();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.changed.wait(lock, [&] {
    auto found = state.pending.find(stream);
    return found == state.pending.end() || found->second == 0;
  });
}

void wait_for_all_streams() {
  HostTasks &state = tasks();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.changed.wait(lock, [&] { return state.total_pending == 0; });
}

void forget_stream(aclrtStream stream) {
  HostTasks &state = tasks();
  std::lock_guard<std::mutex> guard(state.mutex);
  state.pending.erase(stream);
  state.subscriber.erase(stream);
}

}  // namespace memprof_sim
