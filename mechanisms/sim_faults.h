// SPDX-License-Identifier: Apache-2.0
//
// The text that tells the simulated driver which calls to fail or delay. Pure but for the counters of
// FaultPlan, which are atomic; any thread.
//
//   spec     := item (',' item)*
//   item     := call ['@' k | '<' duration] '=' (error | '+' duration)
//             | 'attr:' name '=' value | 'pin_limit=' size
//   call     := a function of the driver table, e.g. cuMemCreate
//   error    := the part of CUDA_ERROR_* after that prefix, e.g. OUT_OF_MEMORY
// '@k' hits the k-th call of that function in this process (from 1) and no other, '<20s' every call in
// the first 20 seconds after the driver was opened, neither: every call. Delays of several items add up;
// of several errors the first in the text is answered. attr: VMM (virtual memory management), POSIX_FD
// (export of descriptors), HOST_REGISTER, READONLY_PIN (read-only registration), NVML (its
// lists of processes), each 0 or 1. pin_limit: most bytes that cuMemHostRegister takes in this process. An empty text
// is a plan without faults.
#ifndef RESIDENCY_MECHANISMS_SIM_FAULTS_H_
#define RESIDENCY_MECHANISMS_SIM_FAULTS_H_

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace residency {

struct CallFault {
  CUresult error = CUDA_SUCCESS;  // CUDA_SUCCESS: answer as usual after the delay
  absl::Duration delay = absl::ZeroDuration();
};

class FaultPlan {
 public:
  // INVALID_ARGUMENT/BAD_FAULTS names the item and what is wrong with it.
  static absl::StatusOr<std::unique_ptr<FaultPlan>> Parse(std::string_view spec);

  // Counts a call of `call` made `since_open` after the driver was opened and says what happens to it.
  CallFault OnCall(std::string_view call, absl::Duration since_open);

  // The value that the spec gives an attribute, if any.
  std::optional<int> Attribute(std::string_view name) const;
  std::optional<uint64_t> pin_limit_bytes() const { return pin_limit_bytes_; }

 private:
  struct Rule {
    std::optional<uint64_t> only_call;         // '@k'
    std::optional<absl::Duration> only_first;  // '<duration'
    CallFault fault;
  };
  struct CallRules {
    std::atomic<uint64_t> calls{0};
    std::vector<Rule> rules;
  };

  FaultPlan() = default;
  absl::Status AddItem(std::string_view item);
  absl::Status AddAttribute(std::string_view item, std::string_view name, std::string_view value);
  absl::Status AddRule(std::string_view item, std::string_view target, std::string_view effect);

  std::map<std::string, CallRules, std::less<>> calls_;
  std::map<std::string, int, std::less<>> attributes_;
  std::optional<uint64_t> pin_limit_bytes_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_FAULTS_H_
