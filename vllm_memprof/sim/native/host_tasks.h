// Host functions and callbacks that were submitted to streams and have not run yet.
#pragma once

#include "acl.h"

#include <functional>

namespace memprof_sim {

// On a thread of the shim, in the order in which they come.
void enqueue_host_function(aclrtStream stream, std::function<void()> work);

// Callbacks run on the thread that subscribed to their stream, when it asks for them. A thread's id
// is a pthread_t or a kernel thread id, by the caller's choice.
bool subscribe(uint64_t thread, aclrtStream stream);    // false: the stream has a subscriber
bool unsubscribe(uint64_t thread, aclrtStream stream);  // false: this thread is not its subscriber
bool enqueue_callback(aclrtStream stream, std::function<void()> work);  // false: no subscriber
// Runs one callback of the calling thread, which it awaits for timeout_ms, or for ever when that is
// negative.
enum class Processed { kOne, kTimeout, kNotSubscribed };
Processed process_callback(int32_t timeout_ms);

void wait_for_stream(aclrtStream stream);  // until its host functions and callbacks have run
void wait_for_all_streams();
void forget_stream(aclrtStream stream);

}  // namespace memprof_sim
