// SPDX-License-Identifier: Apache-2.0
//
// The test driver's table with a counter and faults before every entry, and a count of what the driver has given out
// and not got back. Process-wide, as CUDA's functions have no "this"; for calls from one thread.
#ifndef RESIDENCY_TESTS_FAULT_DRIVER_H_
#define RESIDENCY_TESTS_FAULT_DRIVER_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "mechanisms/driver.h"

namespace residency {

// The entries of the table, and a fault of its own: a copy of a whole cell to the device that flips one bit and says
// nothing.
#define RESIDENCY_DRIVER_CALL(name) k_##name,
enum DriverCall : int { RESIDENCY_DRIVER_CALLS(RESIDENCY_DRIVER_CALL) kFlippedCopy, kDriverCallCount };
#undef RESIDENCY_DRIVER_CALL

std::string_view DriverCallName(DriverCall call);

// Calls number `first` to `last` of `call`, counted from 1 since Reset, fail with `error`.
struct DriverFault {
  DriverCall call;
  uint64_t first = 1;
  uint64_t last = 1;
  CUresult error = CUDA_ERROR_INVALID_VALUE;
};

// What the driver keeps for the caller of the table.
struct DriverHoldings {
  struct Handle {
    uint64_t bytes = 0;
    int references = 0;
    int refused = 0;  // references that the caller gave back, which a fault made the driver refuse
  };
  std::map<CUmemGenericAllocationHandle, Handle> handles;
  std::map<CUdeviceptr, uint64_t> ranges;  // bytes by address
  int refused_ranges = 0;

  // Of handles that the caller still holds.
  uint64_t held_bytes() const;
  size_t held_handles() const;
};

class FaultDriver {
 public:
  static const Driver& Table();

  // Counters to 0, no faults.
  static void Reset();
  static void Arm(const DriverFault& fault);
  static void Disarm();

  static uint64_t calls(DriverCall call);
  // How many calls a fault has hit since Reset.
  static uint64_t hits();
  static const DriverHoldings& holdings();
  // Gives back what faults made the driver refuse, so that the next test begins with an empty card.
  static void TakeBackRefused();
};

// The error that fits a call: out of memory for what allocates, a bad value for most others.
CUresult FittingError(DriverCall call);

}  // namespace residency

#endif  // RESIDENCY_TESTS_FAULT_DRIVER_H_
