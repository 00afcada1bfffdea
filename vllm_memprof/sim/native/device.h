// Devices and contexts of this process.
#pragma once

#include "acl.h"

namespace memprof_sim {

// The device of the current context; makes a context on the default device where one is configured.
// -1 without a context.
int current_device();
bool device_valid(int device);
int visible_device_count();
int physical_device(
    int device);  // position in the accounting file, after ASCEND_RT_VISIBLE_DEVICES

// Drops one use of the device, or all of them. With the last one `release` gives back what the
// process holds there.
void drop_device(int device, bool all_uses, void (*release)(int device));

}  // namespace memprof_sim
