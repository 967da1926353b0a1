// SPDX-License-Identifier: Apache-2.0
//
// Decides what a registration takes of the host: whether its copy fits, whether it is page-locked, and whether it is
// one that another model of the same files has already. Part of the decision core: pure.
#ifndef RESIDENCY_DAEMON_HOST_ROOM_H_
#define RESIDENCY_DAEMON_HOST_ROOM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/ids.h"

namespace residency {

struct Records;
struct RegisterRequested;

// Where a model's bytes are in host memory.
enum class HostTier : uint8_t {
  kMirror,  // a copy of its own, laid out as on the device
  kFile,    // the page cache of the weight files, mapped and page-locked for reading: no second copy
};

// "mirror", "file".
std::string_view HostTierName(HostTier tier);

// What the operator or the caller of a registration says of page-locking.
enum class PinPolicy : uint8_t {
  kAuto,  // where the host has twice as much as the set, and the driver does not refuse
  kYes,   // or the registration fails
  kNo,
};

// What counts for a registration of this tier that does not say, where the operator says `configured`: that is about
// copies in host memory. Only a caller can contradict himself.
inline PinPolicy DefaultPin(HostTier tier, PinPolicy configured) {
  return tier == HostTier::kFile ? PinPolicy::kAuto : configured;
}

// Why a host copy is page-locked, or is not.
enum class PinReason : uint8_t {
  kRequested,   // an explicit choice
  kRoom,        // the host has at least twice as much as the set
  kLittleRoom,  // it has less
  kRefused,     // the driver refused to
  kShared,      // it is another model's, as that one wanted it
  kHostTier,    // the host tier is nothing without
};

// How it came out, or would come out.
struct PinOutcome {
  bool pinned = false;
  PinReason reason = PinReason::kRequested;
  std::string message;  // a sentence with the figures
};

// What whoever builds a copy is to do about it.
enum class PinWish : uint8_t {
  kNo,
  kTry,   // stays pageable where the driver refuses
  kMust,  // fails then
};

// The host's memory, as measured when a registration comes.
struct HostRoom {
  // What the system and the cgroups leave to mirrors, beyond those there are and what readings under way still take.
  // Locked pages of weight files are in it: the system counts them as any page cache, which it could take back.
  std::optional<uint64_t> available_bytes;
  // Most of all mirrors together, as a cgroup limits them.
  std::optional<uint64_t> cgroup_limit_bytes;
};

struct HostPlan {
  HostCopyId copy;  // nobody: a new one
  uint64_t needed_bytes = 0;
  std::optional<uint64_t> available_bytes;  // within every budget; nothing where none is known
  // RESOURCE_EXHAUSTED/HOST_BUDGET with both figures where it does not fit.
  absl::Status room;
  PinWish wish = PinWish::kTry;
  PinOutcome pin;  // so far as is known before the driver is asked
  // A copy of its own would be more than half of what the host has.
  bool little_room = false;
};

// What its host copy takes of the host: the set, or the pages of its files that are locked.
uint64_t HostBytes(const RegisterRequested& event);

// Whether the host tier goes with the rest of what was asked for. INVALID_ARGUMENT/BAD_HOST_TIER, BAD_PIN.
absl::Status CheckTier(const RegisterRequested& event);

// `configured_bytes` is --host_budget. The name is not looked at.
HostPlan PlanHost(const RegisterRequested& event, const Records& records, std::optional<uint64_t> configured_bytes);

// What all host copies may take together as things are: never more than was configured, than a cgroup leaves, or than
// the host has. Nothing where nothing limits them.
std::optional<uint64_t> HostBudgetBytes(const HostRoom& room, const Records& records,
                                        std::optional<uint64_t> configured_bytes);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_HOST_ROOM_H_
