// SPDX-License-Identifier: Apache-2.0
//
// Events, effects and the core's options as messages of proto/recording.proto. What goes in comes out equal, but for
// a layout's tensors, which no decision needs. Pure; any thread.
//
// A message of the wrong shape is a mistake of ours, found by the first test that records such a value (CHECK). What
// comes out of a file is checked: INVALID_ARGUMENT names what is wrong.
#ifndef RESIDENCY_DAEMON_RECORDING_CODEC_H_
#define RESIDENCY_DAEMON_RECORDING_CODEC_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/arbiter.h"
#include "daemon/events.h"
#include "proto/recording.pb.h"

namespace residency {

void ToProto(const ArbiterOptions& options, recording::v1::ArbiterOptions& message);
void ToProto(absl::Time time, recording::v1::Time& message);
void ToProto(const Event& event, recording::v1::Event& message);
void ToProto(const Effect& effect, recording::v1::Effect& message);

absl::StatusOr<ArbiterOptions> FromProto(const recording::v1::ArbiterOptions& message);
absl::Time FromProto(const recording::v1::Time& message);
absl::StatusOr<Event> FromProto(const recording::v1::Event& message);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RECORDING_CODEC_H_
