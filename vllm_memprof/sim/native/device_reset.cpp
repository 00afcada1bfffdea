// Device resets: what the process holds on a device goes with its last use.
#include "accounting.h"
#include "device.h"
#include "error.h"
#include "memory.h"
#include "physical.h"

namespace memprof_sim {
namespace {

void release(int device) {
  memory_forget_device(device);
  physical_forget_device(device);
  account_release_device(physical_device(device));
}

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtResetDevice(int32_t device) {
  if (!device_valid(device))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtResetDevice: no device %d", device);
  drop_device(device, false, release);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtResetDeviceForce(int32_t device) {
  if (!device_valid(device))
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtResetDeviceForce: no device %d", device);
  drop_device(device, true, release);
  return ACL_SUCCESS;
}
