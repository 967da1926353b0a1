// SPDX-License-Identifier: Apache-2.0
//
// Puts what the core promised and what the driver measured side by side, as messages of the service. Pure.
#ifndef RESIDENCY_DAEMON_STATUS_H_
#define RESIDENCY_DAEMON_STATUS_H_

#include <functional>
#include <optional>

#include "absl/time/time.h"
#include "daemon/gpu.h"
#include "daemon/records.h"
#include "mechanisms/device.h"
#include "mechanisms/layout.h"
#include "proto/residency.pb.h"

namespace residency {

// How to ask about a lease what the core does not know.
struct LeaseProbe {
  std::function<bool(LeaseId)> in_use;            // its use word
  std::function<uint64_t(LeaseId)> mapped_bytes;  // what its client acknowledged
};

v1::DeviceStatus DeviceStatusOf(const DeviceInfo& info, const DeviceRecord& record, const GpuMeasurement& measured,
                                const Records& records);

v1::Pin PinProto(const PinOutcome& pin);
v1::HostTier HostTierProto(HostTier tier);
v1::VerifiedAgainst VerifiedAgainstProto(HostTier tier);
// The least of the limits on page-locking that are known: what the driver had locked when it refused more, what was
// configured, what a cgroup leaves.
void SetPinLimit(v1::HostStatus& host, std::optional<uint64_t> probed_bytes, std::optional<uint64_t> configured_bytes,
                 std::optional<uint64_t> cgroup_bytes);

// `layout` has its tensors. Where the model is unknown to the measurement (not read yet, or no memory to
// measure), nothing of it is on the GPU.
v1::ModelStatus ModelStatusOf(const ModelRecord& record, const Layout& layout, const GpuMeasurement& measured,
                              const Records& records, const LeaseProbe& probe, absl::Time now);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_STATUS_H_
