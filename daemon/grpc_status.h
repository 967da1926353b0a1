// SPDX-License-Identifier: Apache-2.0
//
// Turns a Status and the refusal in it into what gRPC sends: code, message, and an RpcStatus as details.
#ifndef RESIDENCY_DAEMON_GRPC_STATUS_H_
#define RESIDENCY_DAEMON_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace residency {

grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_GRPC_STATUS_H_
