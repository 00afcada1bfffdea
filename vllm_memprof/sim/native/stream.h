// Streams. Work runs when it is submitted, so a stream is an identity and its attributes.
#pragma once

#include "acl.h"

namespace memprof_sim {

bool stream_known(aclrtStream stream);  // null is the default stream

}  // namespace memprof_sim
