// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refusal.h"

#include <bit>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"

namespace residency {
namespace {

// The key of our payload among the payloads of a Status.
constexpr char kPayloadUrl[] = "type.residency/Refusal";

// The payload is a plain concatenation of fields in declaration order: integers as 8 little-endian
// bytes, strings and lists behind their length. It never leaves the process, so it carries no version.
class Writer {
 public:
  void Integer(uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) bytes_.push_back(static_cast<char>(value >> shift));
  }
  void Text(std::string_view text) {
    Integer(text.size());
    bytes_.append(text);
  }
  void Optional(const std::optional<uint64_t>& value) {
    Integer(value.has_value() ? 1 : 0);
    Integer(value.value_or(0));
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what Writer wrote. After the first field that does not fit, ok() is false and all fields are
// empty, so that the caller checks once, at the end.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  uint64_t Integer() {
    const std::string_view raw = Take(8);
    uint64_t value = 0;
    for (size_t i = 0; i < raw.size(); ++i) value |= uint64_t{static_cast<unsigned char>(raw[i])} << (8 * i);
    return value;
  }
  std::string Text() { return std::string(Take(Integer())); }
  std::optional<uint64_t> Optional() {
    const bool present = Integer() != 0;
    const uint64_t value = Integer();
    return present ? std::optional<uint64_t>(value) : std::nullopt;
  }
  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && rest_.empty(); }

 private:
  std::string_view Take(uint64_t count) {
    if (!ok_ || count > rest_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  std::string_view rest_;
  bool ok_ = true;
};

std::string Encode(const Refusal& refusal) {
  Writer writer;
  writer.Text(refusal.reason);
  writer.Optional(refusal.needed_bytes);
  writer.Optional(refusal.available_bytes);
  writer.Text(refusal.file);
  writer.Text(refusal.tensor);
  writer.Integer(refusal.holders.size());
  for (const Holder& holder : refusal.holders) {
    writer.Integer(static_cast<uint64_t>(holder.pid));
    writer.Integer(holder.uid);
    writer.Text(holder.client);
    writer.Integer(holder.lease_id);
    writer.Integer(holder.bytes);
    writer.Integer(std::bit_cast<uint64_t>(holder.age_seconds));
  }
  return writer.Take();
}

std::optional<Refusal> Decode(std::string_view bytes) {
  Reader reader(bytes);
  Refusal refusal;
  refusal.reason = reader.Text();
  refusal.needed_bytes = reader.Optional();
  refusal.available_bytes = reader.Optional();
  refusal.file = reader.Text();
  refusal.tensor = reader.Text();
  const uint64_t holder_count = reader.Integer();
  for (uint64_t i = 0; i < holder_count && reader.ok(); ++i) {
    Holder holder;
    holder.pid = static_cast<int64_t>(reader.Integer());
    holder.uid = static_cast<uint32_t>(reader.Integer());
    holder.client = reader.Text();
    holder.lease_id = reader.Integer();
    holder.bytes = reader.Integer();
    holder.age_seconds = std::bit_cast<double>(reader.Integer());
    refusal.holders.push_back(std::move(holder));
  }
  if (!reader.AtEnd()) return std::nullopt;
  return refusal;
}

absl::StatusCode CodeOfErrno(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EACCES:
    case EPERM:
      return absl::StatusCode::kPermissionDenied;
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status Refuse(absl::StatusCode code, Refusal refusal, std::string_view message) {
  absl::Status status(code, std::string(message));
  status.SetPayload(kPayloadUrl, absl::Cord(Encode(refusal)));
  return status;
}

absl::Status Refuse(absl::StatusCode code, std::string_view reason, std::string_view message) {
  Refusal refusal;
  refusal.reason = reason;
  return Refuse(code, std::move(refusal), message);
}

std::optional<Refusal> GetRefusal(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) return std::nullopt;
  return Decode(std::string(*payload));
}

std::string ReasonOf(const absl::Status& status) {
  std::optional<Refusal> refusal = GetRefusal(status);
  return refusal.has_value() ? std::move(refusal->reason) : std::string();
}

absl::Status ErrnoStatus(int error, std::string_view what) {
  // std::system_category is the thread-safe spelling of strerror.
  return absl::Status(CodeOfErrno(error), absl::StrFormat("%s: %s", what, std::system_category().message(error)));
}

}  // namespace residency
