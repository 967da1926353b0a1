// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/proto_json.h"

#include <google/protobuf/descriptor.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using nlohmann::ordered_json;

// MODEL_STATE_ for ModelState.
std::string EnumPrefix(const std::string& type_name) {
  std::string prefix;
  for (const char c : type_name) {
    if (absl::ascii_isupper(c) && !prefix.empty()) prefix.push_back('_');
    prefix.push_back(absl::ascii_toupper(c));
  }
  return absl::StrCat(prefix, "_");
}

std::string EnumWord(const EnumValueDescriptor& value) {
  const std::string prefix = EnumPrefix(value.type()->name());
  const bool prefixed = absl::StartsWith(value.name(), prefix);
  return absl::AsciiStrToLower(prefixed ? value.name().substr(prefix.size()) : value.name());
}

ordered_json TextOf(const FieldDescriptor& field, const std::string& value) {
  return field.type() == FieldDescriptor::TYPE_BYTES ? absl::BytesToHexString(value) : value;
}

ordered_json Singular(const Message& message, const Reflection& reflection, const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.GetFloat(message, &field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumWord(*reflection.GetEnum(message, &field));
    case FieldDescriptor::CPPTYPE_STRING:
      return TextOf(field, reflection.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ProtoToJson(reflection.GetMessage(message, &field));
  }
  return nullptr;
}

ordered_json Element(const Message& message, const Reflection& reflection, const FieldDescriptor& field, int index) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.GetRepeatedInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.GetRepeatedInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection.GetRepeatedUInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.GetRepeatedUInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.GetRepeatedDouble(message, &field, index);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return reflection.GetRepeatedFloat(message, &field, index);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetRepeatedBool(message, &field, index);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumWord(*reflection.GetRepeatedEnum(message, &field, index));
    case FieldDescriptor::CPPTYPE_STRING:
      return TextOf(field, reflection.GetRepeatedString(message, &field, index));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ProtoToJson(reflection.GetRepeatedMessage(message, &field, index));
  }
  return nullptr;
}

ordered_json HolderToJson(const Holder& holder) {
  return {{"pid", holder.pid},           {"uid", holder.uid},     {"client", holder.client},
          {"lease_id", holder.lease_id}, {"bytes", holder.bytes}, {"age_seconds", holder.age_seconds}};
}

}  // namespace

ordered_json ProtoToJson(const Message& message) {
  ordered_json json = ordered_json::object();
  const google::protobuf::Descriptor& descriptor = *message.GetDescriptor();
  const Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    if (field.is_repeated()) {
      ordered_json list = ordered_json::array();
      const int size = reflection.FieldSize(message, &field);
      for (int index = 0; index < size; ++index) list.push_back(Element(message, reflection, field, index));
      json[field.name()] = std::move(list);
    } else if (!field.has_presence() || reflection.HasField(message, &field)) {
      json[field.name()] = Singular(message, reflection, field);
    }
  }
  return json;
}

ordered_json ErrorToJson(const absl::Status& status) {
  const Refusal refusal = GetRefusal(status).value_or(Refusal{});
  ordered_json error = {{"code", absl::StatusCodeToString(status.code())},
                        {"reason", refusal.reason},
                        {"message", std::string(status.message())}};
  if (refusal.needed_bytes.has_value()) error["needed_bytes"] = *refusal.needed_bytes;
  if (refusal.available_bytes.has_value()) error["available_bytes"] = *refusal.available_bytes;
  if (!refusal.file.empty()) error["file"] = refusal.file;
  if (!refusal.tensor.empty()) error["tensor"] = refusal.tensor;
  error["holders"] = ordered_json::array();
  for (const Holder& holder : refusal.holders) error["holders"].push_back(HolderToJson(holder));
  ordered_json document;
  document["error"] = std::move(error);
  return document;
}

std::string JsonText(const ordered_json& json, bool one_line) {
  return json.dump(one_line ? -1 : 2, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace);
}

}  // namespace residency
