// SPDX-License-Identifier: Apache-2.0
//
// The status of a gRPC call as an absl::Status: its details, a RpcStatus with one Refusal, become the refusal that
// mechanisms/refusal.h knows. Pure; any thread.
#ifndef RESIDENCY_CLIENT_GRPC_STATUS_H_
#define RESIDENCY_CLIENT_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace residency {

// Without details, what gRPC says of its own gets a reason: DEADLINE_EXCEEDED/NO_ANSWER (our deadline passed),
// UNAVAILABLE/CONNECTION_LOST (the daemon went away), CANCELLED/CANCELLED, UNIMPLEMENTED/UNIMPLEMENTED (an older
// daemon). Other codes keep the message and have no refusal.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_GRPC_STATUS_H_
