// SPDX-License-Identifier: Apache-2.0
//
// Decides whether a model fits a device as measured, and who makes room when it does not. Pure.
#ifndef RESIDENCY_DAEMON_SCHEDULER_H_
#define RESIDENCY_DAEMON_SCHEDULER_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "daemon/ids.h"

namespace residency {

// A device's memory as the driver reported it, and the two limits that the operator set.
struct DeviceRoom {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;
  uint64_t pool_idle_bytes = 0;  // idle cells: as good as free, since they are used or given back
  uint64_t broker_bytes = 0;     // mapped under models
  uint64_t promised_bytes = 0;   // claimed by phased models for a phase to come, and not there yet
  uint64_t budget_bytes = 0;     // most that the broker may hold
  uint64_t reserve_bytes = 0;    // left free for others

  // What a model may take now without anybody giving way: the lesser of what is free beyond the reserve
  // and what the budget leaves, less what is promised already.
  uint64_t available_bytes() const;
  // Neither free, nor ours: other programs, and CUDA contexts.
  uint64_t others_bytes() const;
};

// An active model on the same device.
struct Occupant {
  ModelId model;
  uint64_t device_bytes = 0;  // on the GPU
  bool in_use = false;
  absl::Time last_used;
  uint64_t promised_bytes = 0;  // claimed beyond that
};

struct RoomDecision {
  bool fits = false;                // once `victims` are gone, which may be nobody
  std::vector<ModelId> victims;     // least recently used first, only what is needed
  uint64_t available_bytes = 0;     // once all that are not in use are gone
  std::vector<ModelId> in_the_way;  // does not fit, but would if these, which are in use, went too
};

// Makes room for `needed_bytes`: nobody gives way when it fits as it is; models in use never do. When
// all idle models together are not enough, nobody is a victim.
RoomDecision DecideRoom(uint64_t needed_bytes, const DeviceRoom& room, std::vector<Occupant> occupants);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_SCHEDULER_H_
