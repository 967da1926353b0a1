// SPDX-License-Identifier: Apache-2.0
#include "client/grpc_status.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"
#include "proto/residency.pb.h"

namespace residency {
namespace {

std::optional<v1::Refusal> RefusalInDetails(const std::string& details) {
  v1::RpcStatus rpc;
  v1::Refusal refusal;
  if (details.empty() || !rpc.ParseFromString(details)) return std::nullopt;
  for (const google::protobuf::Any& any : rpc.details()) {
    if (any.UnpackTo(&refusal)) return refusal;
  }
  return std::nullopt;
}

Refusal FromProto(const v1::Refusal& proto) {
  Refusal refusal;
  refusal.reason = proto.reason();
  if (proto.has_needed_bytes()) refusal.needed_bytes = proto.needed_bytes();
  if (proto.has_available_bytes()) refusal.available_bytes = proto.available_bytes();
  refusal.file = proto.file();
  refusal.tensor = proto.tensor();
  for (const v1::Holder& holder : proto.holders()) {
    refusal.holders.push_back(
        {holder.pid(), holder.uid(), holder.client(), holder.lease_id(), holder.bytes(), holder.age_seconds()});
  }
  return refusal;
}

absl::Status WithoutDetails(absl::StatusCode code, const std::string& message) {
  switch (code) {
    case absl::StatusCode::kDeadlineExceeded:
      return Refuse(code, "NO_ANSWER", "the daemon did not answer in time");
    case absl::StatusCode::kUnavailable:
      return Refuse(code, "CONNECTION_LOST", absl::StrCat("the connection to the daemon broke: ", message));
    case absl::StatusCode::kCancelled:
      return Refuse(code, "CANCELLED", "the call was cancelled");
    case absl::StatusCode::kUnimplemented:
      return Refuse(code, "UNIMPLEMENTED", "the daemon does not know this call: it is of another version");
    default:
      return absl::Status(code, message);
  }
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // Both sides use the canonical codes.
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  const auto refusal = RefusalInDetails(status.error_details());
  if (!refusal.has_value()) return WithoutDetails(code, status.error_message());
  return Refuse(code, FromProto(*refusal), status.error_message());
}

}  // namespace residency
