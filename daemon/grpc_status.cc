// SPDX-License-Identifier: Apache-2.0
#include "daemon/grpc_status.h"

#include "mechanisms/refusal.h"
#include "proto/residency.pb.h"

namespace residency {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // The codes of both have the same numbers.
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message(status.message());
  v1::RpcStatus details;
  details.set_code(static_cast<int>(code));
  details.set_message(message);
  if (const auto refusal = GetRefusal(status)) {
    v1::Refusal packed;
    packed.set_reason(refusal->reason);
    if (refusal->needed_bytes.has_value()) packed.set_needed_bytes(*refusal->needed_bytes);
    if (refusal->available_bytes.has_value()) packed.set_available_bytes(*refusal->available_bytes);
    packed.set_file(refusal->file);
    packed.set_tensor(refusal->tensor);
    for (const Holder& holder : refusal->holders) {
      v1::Holder& added = *packed.add_holders();
      added.set_pid(holder.pid);
      added.set_uid(holder.uid);
      added.set_client(holder.client);
      added.set_lease_id(holder.lease_id);
      added.set_bytes(holder.bytes);
      added.set_age_seconds(holder.age_seconds);
    }
    details.add_details()->PackFrom(packed);
  }
  return grpc::Status(code, message, details.SerializeAsString());
}

}  // namespace residency
