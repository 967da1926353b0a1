// SPDX-License-Identifier: Apache-2.0
#include "daemon/device_shares.h"

#include <algorithm>

#include "mechanisms/units.h"

namespace residency {

DeviceShares ShareOut(const MeasuredMemory& measured) {
  DeviceShares shares;
  shares.broker_bytes = std::min(measured.broker_bytes, measured.total_bytes);
  // Cells that were unmapped and given back after they were counted are in the free figure as well.
  shares.free_bytes = std::min(measured.free_bytes, measured.total_bytes - shares.broker_bytes);
  uint64_t left_bytes = measured.total_bytes - shares.broker_bytes - shares.free_bytes;
  // An idle cell that was mapped before the cells were counted is in both of their figures.
  shares.pool_idle_bytes = std::min(measured.pool_idle_bytes, left_bytes);
  left_bytes -= shares.pool_idle_bytes;
  if (measured.processes.has_value()) {
    // The driver charges a cell to the daemon, which made it, for as long as the daemon has it. Whatever else that
    // process has is its context. What the processes were told to have after the free figure may be more than that
    // leaves.
    const uint64_t own_bytes =
        SaturatingSubtract(measured.processes->daemon_bytes, measured.broker_bytes + measured.pool_idle_bytes);
    shares.contexts_bytes = std::min(own_bytes + measured.processes->clients_bytes, left_bytes);
    left_bytes -= *shares.contexts_bytes;
  }
  shares.others_bytes = left_bytes;
  return shares;
}

}  // namespace residency
