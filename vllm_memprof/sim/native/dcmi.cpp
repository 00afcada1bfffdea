// DCMI, the driver's management interface: which processes hold memory of a device. Every device is
// a card of its own with one chip. The calls and their structure are documented by Ascend's HDK
// ("DCMI API Reference"); no header of the engine declares them.
#include <algorithm>

#include "accounting.h"
#include "acl.h"
#include "profile.h"

namespace memprof_sim {
namespace {

constexpr int kOk = 0, kInvalidParameter = -8001, kInvalidDevice = -8007;
constexpr size_t kMostProcesses = 32;

bool card_exists(int card, int chip) {
  return card >= 0 && card < static_cast<int>(profile().device_count) && chip == 0;
}

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

struct dcmi_proc_mem_info {
  int proc_id;  // of the host
  unsigned long
      proc_mem_usage;  // bytes: what the process allocated, and its part of the device's own system
};

// Of the driver itself (libascend_hal.so): how many devices there are, visible or not.
SHIM_API int drvGetDevNum(unsigned int *count) {
  if (!count || !profile().valid) return 3;  // DRV_ERROR_INVALID_VALUE
  *count = static_cast<unsigned int>(profile().device_count);
  return 0;
}

SHIM_API int dcmi_init() { return profile().valid ? kOk : kInvalidDevice; }

SHIM_API int dcmi_get_card_num_list(int *count, int *cards, int room) {
  if (!count || !cards) return kInvalidParameter;
  *count = std::min(static_cast<int>(profile().device_count), room);
  for (int card = 0; card < *count; ++card) cards[card] = card;
  return kOk;
}

SHIM_API int dcmi_get_device_num_in_card(int card, int *count) {
  if (!count || !card_exists(card, 0)) return kInvalidParameter;
  *count = 1;
  return kOk;
}

SHIM_API int dcmi_get_device_id_in_card(int card, int *chips, int *mcu, int *cpu) {
  if (!chips || !mcu || !cpu || !card_exists(card, 0)) return kInvalidParameter;
  *chips = 1;
  *mcu = *cpu = -1;  // none
  return kOk;
}

SHIM_API int dcmi_get_card_id_device_id_from_logicid(int *card, int *chip, unsigned int logic) {
  if (!card || !chip || !card_exists(static_cast<int>(logic), 0)) return kInvalidParameter;
  *card = static_cast<int>(logic);
  *chip = 0;
  return kOk;
}

SHIM_API int dcmi_get_device_resource_info(int card, int chip, dcmi_proc_mem_info *processes,
                                           int *count) {
  if (!processes || !count || !card_exists(card, chip)) return kInvalidParameter;
  if (!account_available()) return kInvalidDevice;
  std::vector<ProcessUsage> held = account_processes(card);
  size_t written = std::min(held.size(), kMostProcesses);
  for (size_t row = 0; row < written; ++row)
    processes[row] = {held[row].pid, static_cast<unsigned long>(held[row].bytes)};
  *count = static_cast<int>(written);
  return kOk;
}
