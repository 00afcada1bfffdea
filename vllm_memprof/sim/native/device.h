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

// Waits until the threads that torch_npu launches operators from have nothing left: what a program
// submitted is charged before the program is told what is free, so that equal ones are told equal.
void await_launches();

// Drops one use of the device, or all of them. With the last one `release` gives back what the
// process holds there.
void drop_device(int device, bool all_uses, void (*release)(int device));

}  // namespace memprof_sim
