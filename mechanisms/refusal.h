// SPDX-License-Identifier: Apache-2.0
//
// A refusal is an absl::Status that a script can tell apart: a reason in capitals beside the code, and
// the figures, file, tensor and holders that the message also names. It travels as a payload of the
// Status, so that code in between passes it on without knowing it; the service turns it into the error
// details of gRPC. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_REFUSAL_H_
#define RESIDENCY_MECHANISMS_REFUSAL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace residency {

// A process that stands in the way: it holds a lease in use, or memory.
struct Holder {
  int64_t pid = 0;
  uint32_t uid = 0;
  std::string client;
  uint64_t lease_id = 0;   // 0: memory without a lease
  uint64_t bytes = 0;      // what it holds, 0 where that is not the point
  double age_seconds = 0;  // of the lease

  bool operator==(const Holder&) const = default;
};

struct Refusal {
  std::string reason;  // GPU_BUDGET, IN_USE, FILE_TRUNCATED, ...; never empty
  std::optional<uint64_t> needed_bytes;
  std::optional<uint64_t> available_bytes;
  std::string file;    // path of the file at fault
  std::string tensor;  // name of the tensor at fault
  std::vector<Holder> holders;

  bool operator==(const Refusal&) const = default;
};

// A Status with `code` and `message` that carries `refusal`.
absl::Status Refuse(absl::StatusCode code, Refusal refusal, std::string_view message);

// Shorthand for a refusal that has a reason and nothing else.
absl::Status Refuse(absl::StatusCode code, std::string_view reason, std::string_view message);

// The refusal that `status` carries, or nothing.
std::optional<Refusal> GetRefusal(const absl::Status& status);

// The reason that `status` carries, or "" where it carries none.
std::string ReasonOf(const absl::Status& status);

// The Status for a failed system call: `what` is the call and its object, `error` an errno value.
// ENOENT is NOT_FOUND, EACCES and EPERM are PERMISSION_DENIED, ENOMEM, ENOSPC, EMFILE and ENFILE are
// RESOURCE_EXHAUSTED, anything else is INTERNAL.
absl::Status ErrnoStatus(int error, std::string_view what);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_REFUSAL_H_
