// Streams. Work runs when it is submitted, so a stream is an identity and its attributes.
#pragma once

#include "acl.h"

#include <string>

namespace memprof_sim {

bool stream_known(aclrtStream stream);  // null is the default stream
// As the runtime says it that a device has no more streams, for a call of it and what that was for.
std::string no_streams(const char *call, const char *action);

}  // namespace memprof_sim
