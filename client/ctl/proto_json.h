// SPDX-License-Identifier: Apache-2.0
//
// A message as JSON for scripts: original field names, 64-bit integers as numbers, enums as lower-case words without
// their type's prefix, zeros printed, lists always there, and absent what is not set but could be. protobuf's own JSON
// writes 64-bit integers as strings, which is why this exists. Pure; any thread.
#ifndef RESIDENCY_CLIENT_CTL_PROTO_JSON_H_
#define RESIDENCY_CLIENT_CTL_PROTO_JSON_H_

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"

namespace residency {

// Fields in the order of the .proto file. `bytes` fields are hexadecimal.
nlohmann::ordered_json ProtoToJson(const google::protobuf::Message& message);

// {"error":{"code","reason","message","needed_bytes","available_bytes","file","tensor","holders":[...]}}; figures, file
// and tensor only where the refusal has them.
nlohmann::ordered_json ErrorToJson(const absl::Status& status);

// The text of a document; a byte that is no UTF-8 becomes U+FFFD.
std::string JsonText(const nlohmann::ordered_json& json, bool one_line = false);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_PROTO_JSON_H_
