// SPDX-License-Identifier: Apache-2.0
//
// A phase of a model that was registered as phased: a span in which one of its components is on the GPU, under the
// addresses that it always has. The lease's other tensors have addresses without memory meanwhile.
//
//   auto phase = lease->BeginPhase("text_encoder");
//   {
//     auto use = lease->Use({.streams = {&stream, 1}});
//     ... launch kernels that read the text encoder's tensors ...
//   }
//   auto next = lease->BeginPhase("transformer");   // takes the text encoder off
//
// What one client has of a model is one lease, however many Lease objects share it, and a lease is in one phase: a
// phase that one of them begins takes the place of another's, and the first end of a phase that two of them asked for
// ends it for both.
//
// Threads: any; a Phase belongs to one thread at a time. It ends before the Client its lease came from.
#ifndef RESIDENCY_CLIENT_PHASE_H_
#define RESIDENCY_CLIENT_PHASE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace residency {

struct PhaseOptions {
  absl::Time deadline = absl::InfiniteFuture();
};

// What the daemon answered.
struct PhaseBegun {
  uint64_t phase_id = 0;
  uint64_t generation = 0;  // of the lease's cells
  uint64_t bytes_moved = 0;
  absl::Duration duration;
};

// How a lease asks the daemon for phases; Client's part.
class PhaseCalls {
 public:
  virtual ~PhaseCalls() = default;
  virtual absl::StatusOr<PhaseBegun> CallBeginPhase(uint64_t lease_id, std::string_view component,
                                                    absl::Time deadline) = 0;
  virtual absl::Status CallEndPhase(uint64_t lease_id, uint64_t phase_id) = 0;
};

class Phase {
 public:
  Phase(Phase&& other) noexcept
      : calls_(std::exchange(other.calls_, nullptr)), lease_id_(other.lease_id_), begun_(other.begun_) {}
  Phase& operator=(Phase&& other) noexcept {
    std::swap(calls_, other.calls_);
    std::swap(lease_id_, other.lease_id_);
    std::swap(begun_, other.begun_);
    return *this;
  }
  // As End; what it refuses is lost, and the phase then ends with the next one or with the lease.
  ~Phase() { (void)End(); }

  // Takes the component off, unless other leases are in its phase too. Uses have ended; the device work that they gave
  // to their streams is waited for. No error where the phase is over already.
  //  FAILED_PRECONDITION/IN_USE: a use is still under way, the phase goes on; errors of the call EndPhase.
  absl::Status End();

  // What the beginning moved: 0 where the component was there.
  uint64_t bytes_moved() const { return begun_.bytes_moved; }
  absl::Duration duration() const { return begun_.duration; }

 private:
  friend class Lease;
  Phase(PhaseCalls& calls, uint64_t lease_id, PhaseBegun begun) : calls_(&calls), lease_id_(lease_id), begun_(begun) {}

  PhaseCalls* calls_;  // nullptr once it is over, or moved from
  uint64_t lease_id_;
  PhaseBegun begun_;
};

}  // namespace residency

#endif  // RESIDENCY_CLIENT_PHASE_H_
