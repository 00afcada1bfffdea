// Streams under graph capture.
#pragma once

#include "acl.h"

#include <functional>

namespace memprof_sim {

// Records a host function into the graph that the stream is captured into; false: the stream is not
// under capture.
bool capture_record(aclrtStream stream, std::function<void()> host_function);
bool capture_active(aclrtStream stream);
// The stream joins the capture of `captured`, which takes one more stream of the device.
aclError capture_join(aclrtStream stream, aclrtStream captured);
// An event that is recorded under capture is the graph's own.
aclError capture_event(aclrtStream stream);
void graph_count_task(aclrtStream stream);  // where the stream is under capture

}  // namespace memprof_sim
