// SPDX-License-Identifier: Apache-2.0
#include "daemon/scheduler.h"

#include <algorithm>

#include "mechanisms/units.h"

namespace residency {
uint64_t DeviceRoom::available_bytes() const {
  const uint64_t beyond_reserve_bytes = SaturatingSubtract(free_bytes + pool_idle_bytes, reserve_bytes);
  const uint64_t left_bytes = std::min(beyond_reserve_bytes, SaturatingSubtract(budget_bytes, broker_bytes));
  return SaturatingSubtract(left_bytes, promised_bytes);
}

uint64_t DeviceRoom::others_bytes() const {
  return SaturatingSubtract(total_bytes, free_bytes + pool_idle_bytes + broker_bytes);
}

RoomDecision DecideRoom(uint64_t needed_bytes, const DeviceRoom& room, std::vector<Occupant> occupants) {
  RoomDecision decision;
  // By age, and by id where two are equally old, so that the same input gives the same victims.
  std::sort(occupants.begin(), occupants.end(), [](const Occupant& a, const Occupant& b) {
    return a.last_used != b.last_used ? a.last_used < b.last_used : a.model < b.model;
  });
  // What leaves raises both of the limits by its size, but the reserve may have been broken into by others.
  DeviceRoom after = room;
  auto leaves = [&after](const Occupant& occupant) {
    after.pool_idle_bytes += occupant.device_bytes;
    after.broker_bytes = SaturatingSubtract(after.broker_bytes, occupant.device_bytes);
    after.promised_bytes = SaturatingSubtract(after.promised_bytes, occupant.promised_bytes);
  };
  for (const Occupant& occupant : occupants) {
    if (after.available_bytes() >= needed_bytes) break;
    if (occupant.in_use) continue;
    decision.victims.push_back(occupant.model);
    leaves(occupant);
  }
  decision.available_bytes = after.available_bytes();
  decision.fits = decision.available_bytes >= needed_bytes;
  if (decision.fits) return decision;
  decision.victims.clear();
  for (const Occupant& occupant : occupants) {
    if (occupant.in_use) leaves(occupant);
  }
  if (after.available_bytes() < needed_bytes) return decision;
  for (const Occupant& occupant : occupants) {
    if (occupant.in_use) decision.in_the_way.push_back(occupant.model);
  }
  return decision;
}

}  // namespace residency
