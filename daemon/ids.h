// SPDX-License-Identifier: Apache-2.0
//
// Names for things of the decision core, as types of their own so that one is never taken for another.
#ifndef RESIDENCY_DAEMON_IDS_H_
#define RESIDENCY_DAEMON_IDS_H_

#include <compare>
#include <cstdint>

namespace residency {

template <typename Tag>
struct Id {
  uint64_t value = 0;  // 0 is nobody
  auto operator<=>(const Id&) const = default;
  explicit operator bool() const { return value != 0; }
};

using ModelId = Id<struct ModelTag>;
using LeaseId = Id<struct LeaseTag>;
using SessionId = Id<struct SessionTag>;  // the wire's 128 random bits name the same session
using RequestId = Id<struct RequestTag>;
using DeviceId = Id<struct DeviceTag>;      // 1 for the first device in the driver's order; its UUID is the key outside
using HostCopyId = Id<struct HostCopyTag>;  // the mirrors of one set of files, which several models may share
using TimerId = Id<struct TimerTag>;
using PhaseId = Id<struct PhaseTag>;  // one lease's stay in one component's phase; never used twice

}  // namespace residency

#endif  // RESIDENCY_DAEMON_IDS_H_
