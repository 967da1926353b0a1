// SPDX-License-Identifier: Apache-2.0
//
// Splits a device's memory, as measured, into parts that add up to its total to the byte. Pure.
#ifndef RESIDENCY_DAEMON_DEVICE_SHARES_H_
#define RESIDENCY_DAEMON_DEVICE_SHARES_H_

#include <cstdint>
#include <optional>

namespace residency {

// The figures as they came, each asked for a little after the one before: cells of the pool, cells under models, what
// is free, what processes have.
struct MeasuredMemory {
  uint64_t pool_idle_bytes = 0;
  uint64_t broker_bytes = 0;
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  struct Processes {
    uint64_t daemon_bytes = 0;   // all that this process has: its context and every cell
    uint64_t clients_bytes = 0;  // the same of all that have a session: no cells, which are their maker's
  };
  std::optional<Processes> processes;  // absent: nobody tells them apart
};

// total = free + broker + pool_idle + contexts + others, absent contexts being 0.
struct DeviceShares {
  uint64_t free_bytes = 0;
  uint64_t broker_bytes = 0;
  uint64_t pool_idle_bytes = 0;
  std::optional<uint64_t> contexts_bytes;  // of the daemon and its clients, with all that these have beside cells
  uint64_t others_bytes = 0;
};

// While nothing moves and all figures are right, none is changed. In the middle of a transition they contradict each
// other, since they are of different moments; then what was asked cell by cell stands, the pool is what it leaves of
// the memory that is used, and what no figure covers is in `others`.
DeviceShares ShareOut(const MeasuredMemory& measured);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_DEVICE_SHARES_H_
