// Streams under graph capture.
#pragma once

#include "acl.h"

#include <functional>

namespace memprof_sim {

// Records a node into the graph that the stream is captured into; false: the stream is not under
// capture.
bool capture_record(aclrtStream stream, std::function<void()> node);
bool capture_active(aclrtStream stream);
void capture_join(aclrtStream stream,
                  aclrtStream captured);    // stream joins the capture of `captured`
void graph_count_task(aclrtStream stream);  // where the stream is under capture

}  // namespace memprof_sim
