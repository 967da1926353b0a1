// SPDX-License-Identifier: Apache-2.0
#include "daemon/grpc_status.h"

#include <simdjson.h>

#include <algorithm>
#include <string>

#include "absl/strings/escaping.h"
#include "mechanisms/refusal.h"
#include "proto/residency.pb.h"

namespace residency {
namespace {

// A status travels in the trailing metadata, of which gRPC takes 8 KiB: there a byte of the message may be three, and
// three bytes of details are four. What is longer than this would cost the caller all of it, the code included.
// A file and a tensor (at most 256 bytes) and holders never come together.
constexpr size_t kMaxMessageBytes = 1280;
constexpr size_t kMaxFieldBytes = 1024;
constexpr size_t kMaxHolders = 12;

// `text` as protobuf takes it: UTF-8, while names of files may be any bytes; cut between two characters.
std::string Text(const std::string& text, size_t max_bytes) {
  if (!simdjson::validate_utf8(text)) return Text(absl::CHexEscape(text), max_bytes);
  size_t end = std::min(text.size(), max_bytes);
  while (end < text.size() && end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

// A message is one line, whatever was put into it.
std::string OneLine(const absl::Status& status) {
  std::string line;
  for (const char c : Text(std::string(status.message()), kMaxMessageBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    line.push_back(byte < 0x20 || byte == 0x7f ? '?' : c);
  }
  return line;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // The codes of both have the same numbers.
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message = OneLine(status);
  v1::RpcStatus details;
  details.set_code(static_cast<int>(code));
  details.set_message(message);
  if (const auto refusal = GetRefusal(status)) {
    v1::Refusal packed;
    packed.set_reason(refusal->reason);
    if (refusal->needed_bytes.has_value()) packed.set_needed_bytes(*refusal->needed_bytes);
    if (refusal->available_bytes.has_value()) packed.set_available_bytes(*refusal->available_bytes);
    packed.set_file(Text(refusal->file, kMaxFieldBytes));
    packed.set_tensor(Text(refusal->tensor, kMaxFieldBytes));
    for (size_t i = 0; i < std::min(refusal->holders.size(), kMaxHolders); ++i) {
      const Holder& holder = refusal->holders[i];
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
