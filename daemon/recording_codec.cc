// SPDX-License-Identifier: Apache-2.0
//
// By the reflection of protobuf: for each struct recorded_fields.h has the names, and a message's field is looked up by
// the same name. Two functions for each of fifty structs would be the same words a hundred times over.
#include "daemon/recording_codec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/recorded_fields.h"
#include "daemon/recorded_values.h"

namespace residency {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

template <typename T>
inline constexpr bool kIsId = false;
template <typename Tag>
inline constexpr bool kIsId<Id<Tag>> = true;
template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <typename T>
inline constexpr bool kIsVector = false;
template <typename T>
inline constexpr bool kIsVector<std::vector<T>> = true;
template <typename T>
inline constexpr bool kIsVariant = false;
template <typename... Ts>
inline constexpr bool kIsVariant<std::variant<Ts...>> = true;
template <typename T>
concept HasValueMessage = requires {
  typename ValueMessage<T>::Type;
};
template <typename T>
concept IsStruct = requires {
  Recorded<T>::kMessage;
};

// The fields of `descriptor` for the members of T, in their order.
template <typename T>
std::vector<const FieldDescriptor*> FindFields(const Descriptor& descriptor) {
  std::vector<const FieldDescriptor*> fields;
  for (const auto name : absl::StrSplit(Recorded<T>::kFields, ", ")) {
    fields.push_back(descriptor.FindFieldByName(std::string(name)));
    if (fields.back() == nullptr) {
      ABSL_RAW_LOG(FATAL, "message %s of recording.proto has no field %s", descriptor.name().c_str(),
                   std::string(name).c_str());
    }
  }
  return fields;
}

template <typename T>
const std::vector<const FieldDescriptor*>& FieldsOf(const Message& message) {
  static const std::vector<const FieldDescriptor*> fields = FindFields<T>(*message.GetDescriptor());
  return fields;
}

// The field of the oneof in `descriptor` whose message stands for T.
template <typename T>
const FieldDescriptor* FindAlternative(const Descriptor& descriptor) {
  for (int i = 0; i < descriptor.field_count(); ++i) {
    if (descriptor.field(i)->message_type()->name() == Recorded<T>::kMessage) return descriptor.field(i);
  }
  ABSL_RAW_LOG(FATAL, "message %s of recording.proto has no %s", descriptor.name().c_str(), Recorded<T>::kMessage);
  return nullptr;
}

template <typename T>
const FieldDescriptor* AlternativeOf(const Message& message) {
  static const FieldDescriptor* const field = FindAlternative<T>(*message.GetDescriptor());
  return field;
}

// ---- Into messages. ----

template <typename T>
void Put(Message& message, const FieldDescriptor* field, const T& value);

template <typename... Ts>
void Encode(const std::variant<Ts...>& value, Message& message) {
  std::visit(
      [&](const auto& alternative) {
        using Alternative = std::decay_t<decltype(alternative)>;
        if constexpr (!std::is_same_v<Alternative, std::monostate>) {
          Put(message, AlternativeOf<Alternative>(message), alternative);
        }
      },
      value);
}

template <IsStruct T>
void Encode(const T& value, Message& message) {
  auto field = FieldsOf<T>(message).begin();
  std::apply([&](const auto&... member) { (Put(message, *field++, member), ...); }, Recorded<T>::Fields(value));
}

template <HasValueMessage T>
void Encode(const T& value, Message& message) {
  EncodeValue(value, static_cast<typename ValueMessage<T>::Type&>(message));
}

template <typename T>
void Add(Message& message, const FieldDescriptor* field, const T& value) {
  const Reflection& reflection = *message.GetReflection();
  if constexpr (kIsId<T>) {
    reflection.AddUInt64(&message, field, value.value);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    reflection.AddUInt64(&message, field, value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    reflection.AddString(&message, field, value);
  } else {
    Encode(value, *reflection.AddMessage(&message, field));
  }
}

template <typename T>
void Put(Message& message, const FieldDescriptor* field, const T& value) {
  const Reflection& reflection = *message.GetReflection();
  if constexpr (kIsId<T>) {
    reflection.SetUInt64(&message, field, value.value);
  } else if constexpr (std::is_enum_v<T>) {
    reflection.SetUInt32(&message, field, static_cast<uint32_t>(value));
  } else if constexpr (std::is_same_v<T, bool>) {
    reflection.SetBool(&message, field, value);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    reflection.SetUInt64(&message, field, value);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    reflection.SetInt64(&message, field, value);
  } else if constexpr (std::is_same_v<T, uint32_t>) {
    reflection.SetUInt32(&message, field, value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    reflection.SetString(&message, field, value);
  } else if constexpr (kIsOptional<T>) {
    if (value.has_value()) Put(message, field, *value);
  } else if constexpr (kIsVector<T>) {
    for (const auto& element : value) Add(message, field, element);
  } else {
    Encode(value, *reflection.MutableMessage(&message, field));
  }
}

// ---- Out of messages. ----

template <typename T>
absl::Status Get(const Message& message, const FieldDescriptor* field, T& value);

template <typename... Ts>
absl::Status Decode(const Message& message, std::variant<Ts...>& value) {
  absl::Status status = absl::InvalidArgumentError(
      absl::StrCat("a record has none of the ", message.GetDescriptor()->name(), "s that are known here"));
  const auto take = [&](auto alternative) {
    const FieldDescriptor* const field = AlternativeOf<decltype(alternative)>(message);
    if (!message.GetReflection()->HasField(message, field)) return;
    status = Get(message, field, alternative);
    value = std::move(alternative);
  };
  (take(Ts{}), ...);
  return status;
}

template <IsStruct T>
absl::Status Decode(const Message& message, T& value) {
  absl::Status status;
  auto field = FieldsOf<T>(message).begin();
  std::apply([&](auto&... member) { (status.Update(Get(message, *field++, member)), ...); },
             Recorded<T>::Fields(value));
  return status;
}

template <HasValueMessage T>
absl::Status Decode(const Message& message, T& value) {
  return DecodeValue(static_cast<const typename ValueMessage<T>::Type&>(message), value);
}

template <typename T>
absl::Status GetElement(const Message& message, const FieldDescriptor* field, int index, T& value) {
  const Reflection& reflection = *message.GetReflection();
  if constexpr (kIsId<T>) {
    value.value = reflection.GetRepeatedUInt64(message, field, index);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    value = reflection.GetRepeatedUInt64(message, field, index);
  } else if constexpr (std::is_same_v<T, std::string>) {
    value = reflection.GetRepeatedString(message, field, index);
  } else {
    return Decode(reflection.GetRepeatedMessage(message, field, index), value);
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Get(const Message& message, const FieldDescriptor* field, T& value) {
  const Reflection& reflection = *message.GetReflection();
  if constexpr (kIsId<T>) {
    value.value = reflection.GetUInt64(message, field);
  } else if constexpr (std::is_enum_v<T>) {
    value = static_cast<T>(reflection.GetUInt32(message, field));
  } else if constexpr (std::is_same_v<T, bool>) {
    value = reflection.GetBool(message, field);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    value = reflection.GetUInt64(message, field);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    value = reflection.GetInt64(message, field);
  } else if constexpr (std::is_same_v<T, uint32_t>) {
    value = reflection.GetUInt32(message, field);
  } else if constexpr (std::is_same_v<T, std::string>) {
    value = reflection.GetString(message, field);
  } else if constexpr (kIsOptional<T>) {
    if (reflection.HasField(message, field)) return Get(message, field, value.emplace());
  } else if constexpr (kIsVector<T>) {
    absl::Status status;
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      status.Update(GetElement(message, field, i, value.emplace_back()));
    }
    return status;
  } else {
    return Decode(reflection.GetMessage(message, field), value);
  }
  return absl::OkStatus();
}

}  // namespace

void ToProto(const ArbiterOptions& options, recording::v1::ArbiterOptions& message) { Encode(options, message); }
void ToProto(absl::Time time, recording::v1::Time& message) { EncodeValue(time, message); }
void ToProto(const Event& event, recording::v1::Event& message) { Encode(event, message); }
void ToProto(const Effect& effect, recording::v1::Effect& message) { Encode(effect, message); }

absl::StatusOr<ArbiterOptions> FromProto(const recording::v1::ArbiterOptions& message) {
  ArbiterOptions options;
  if (absl::Status status = Decode(message, options); !status.ok()) return status;
  return options;
}

absl::Time FromProto(const recording::v1::Time& message) {
  absl::Time time;
  (void)DecodeValue(message, time);
  return time;
}

absl::StatusOr<Event> FromProto(const recording::v1::Event& message) {
  Event event;
  if (absl::Status status = Decode(message, event); !status.ok()) return status;
  return event;
}

}  // namespace residency
