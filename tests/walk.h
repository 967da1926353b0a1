// SPDX-License-Identifier: Apache-2.0
//
// A seeded random walk over the rig: requests, clients that come, use, hang up and die, faults of the driver, and time,
// in any order, with what must always hold checked after every step. The same seed takes the same steps.
#ifndef RESIDENCY_TESTS_WALK_H_
#define RESIDENCY_TESTS_WALK_H_

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/core_rig.h"

namespace residency {

// What walks did, so that one that does nothing any more is noticed.
struct WalkCounts {
  uint64_t steps = 0;
  uint64_t events = 0;
  uint64_t answers = 0;
  uint64_t realized = 0;
  uint64_t mapped = 0;
  uint64_t uses = 0;
  uint64_t deaths = 0;
  uint64_t faults = 0;
  uint64_t broken = 0;
  uint64_t phases = 0;
  uint64_t hindered = 0;     // swaps given up since a client did not let all cells go
  uint64_t early_cells = 0;  // that a client mapped before all of their generation were filled
  uint64_t early = 0;
  uint64_t readings_failed = 0;

  WalkCounts& operator+=(const WalkCounts& other);
};

class Walk {
 public:
  explicit Walk(uint64_t seed);

  // Takes `steps` steps, then brings everything to its end. Empty, or what did not hold after step `taken()`.
  std::string Run(uint64_t steps);
  uint64_t taken() const { return counts_.steps; }
  const WalkCounts& counts() const { return counts_; }

 private:
  void Act();
  void Ask();
  void MovePhases();
  void LetHappen();
  void MoveClients();
  void Inject();
  std::string Finish();
  std::string Check(bool all_bytes);
  uint64_t Draw(uint64_t below) { return random_() % below; }
  bool Chance(uint64_t one_in) { return Draw(one_in) == 0; }
  const char* AnyModel();
  // A living client, or nobody.
  SessionId AnyClient(bool with_lease);
  LeaseId AnyLease(SessionId session);

  std::mt19937_64 random_;
  CoreRig rig_;
  WalkCounts counts_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_WALK_H_
