// SPDX-License-Identifier: Apache-2.0
//
// The values inside recorded structs that are not plain numbers and lists: times, statuses, layouts and plans. For
// recording_codec alone. Pure; any thread.
#ifndef RESIDENCY_DAEMON_RECORDED_VALUES_H_
#define RESIDENCY_DAEMON_RECORDED_VALUES_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "mechanisms/layout.h"
#include "mechanisms/plan.h"
#include "proto/recording.pb.h"

namespace residency {

void EncodeValue(absl::Duration value, recording::v1::Duration& message);
void EncodeValue(absl::Time value, recording::v1::Time& message);
void EncodeValue(const absl::Status& value, recording::v1::Status& message);
void EncodeValue(const Layout& value, recording::v1::Layout& message);
void EncodeValue(const Plan& value, recording::v1::Plan& message);

absl::Status DecodeValue(const recording::v1::Duration& message, absl::Duration& value);
absl::Status DecodeValue(const recording::v1::Time& message, absl::Time& value);
absl::Status DecodeValue(const recording::v1::Status& message, absl::Status& value);
// INVALID_ARGUMENT where no layout has such components.
absl::Status DecodeValue(const recording::v1::Layout& message, Layout& value);

// The message that stands for a value of type T.
template <typename T>
struct ValueMessage;
template <>
struct ValueMessage<absl::Duration> {
  using Type = recording::v1::Duration;
};
template <>
struct ValueMessage<absl::Time> {
  using Type = recording::v1::Time;
};
template <>
struct ValueMessage<absl::Status> {
  using Type = recording::v1::Status;
};
template <>
struct ValueMessage<Layout> {
  using Type = recording::v1::Layout;
};
template <>
struct ValueMessage<Plan> {
  using Type = recording::v1::Plan;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RECORDED_VALUES_H_
