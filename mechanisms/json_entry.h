// SPDX-License-Identifier: Apache-2.0
//
// The values that the safetensors header and the explicit table have in common, read out of JSON with
// the same strictness and the same words in their errors. Any thread.
#ifndef RESIDENCY_MECHANISMS_JSON_ENTRY_H_
#define RESIDENCY_MECHANISMS_JSON_ENTRY_H_

#include <simdjson.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/dtype.h"

namespace residency {

// A JSON document that stays put: `root` points into `parser`.
struct JsonDocument {
  simdjson::dom::parser parser;
  simdjson::dom::element root;
};

// Parses `text`, which `file` holds: strict JSON in UTF-8, one value and nothing after it.
// INVALID_ARGUMENT/`reason`.
absl::Status ParseJson(const simdjson::padded_string& text, const std::string& file, std::string_view reason,
                       JsonDocument* document);

// Reads and parses the whole of a JSON file of at most kMaxJsonBytes. NOT_FOUND/`missing_reason`.
inline constexpr uint64_t kMaxJsonBytes = 100'000'000;
absl::Status ReadJsonFile(const std::string& path, std::string_view missing_reason, std::string_view reason,
                          JsonDocument* document);

// The value of `key` in the object at the top of `document`. INVALID_ARGUMENT/`reason` where the top is
// no object or has the key twice or not at all.
absl::StatusOr<simdjson::dom::element> TopField(const JsonDocument& document, const std::string& file,
                                                std::string_view reason, std::string_view key);

// What an error about a value names.
struct EntrySite {
  const std::string& file;
  std::string_view tensor;
  std::string_view reason;  // for a value of the wrong kind
};

// The text of `field`. INVALID_ARGUMENT/`site.reason` where it is no string.
absl::StatusOr<std::string_view> TextOf(const EntrySite& site, std::string_view field, simdjson::dom::element value);

// A name of a tensor or a component, which every client is sent. INVALID_ARGUMENT/`site.reason` where it is no string
// or longer than kMaxEntryNameBytes.
inline constexpr size_t kMaxEntryNameBytes = 4096;
absl::StatusOr<std::string_view> NameOf(const EntrySite& site, std::string_view field, simdjson::dom::element value);
absl::Status CheckNameLength(const EntrySite& site, std::string_view field, std::string_view name);

// A whole number of 0 or more, written as one (2.0 is refused). INVALID_ARGUMENT/`reason`.
absl::StatusOr<uint64_t> CountOf(const EntrySite& site, std::string_view reason, std::string_view field,
                                 simdjson::dom::element value);

// INVALID_ARGUMENT/BAD_DTYPE for a name that the format does not know.
absl::StatusOr<DType> DTypeOf(const EntrySite& site, simdjson::dom::element value);

// INVALID_ARGUMENT/BAD_SHAPE for a dimension that is no whole number of 0 or more, and for more than kMaxDimensions.
inline constexpr size_t kMaxDimensions = 1024;
absl::StatusOr<std::vector<uint64_t>> ShapeOf(const EntrySite& site, simdjson::dom::element value);

// Holds `bytes`, as stated by `field`, against dtype and shape. INVALID_ARGUMENT/BAD_SHAPE where their
// product passes 64 bits or ends inside a byte, SIZE_MISMATCH where it is another number.
absl::Status CheckTensorBytes(const EntrySite& site, DType dtype, std::span<const uint64_t> shape,
                              std::string_view field, uint64_t bytes);

// A field that an entry gives twice, and one that it lacks. INVALID_ARGUMENT/`site.reason`.
absl::Status FieldTwice(const EntrySite& site, std::string_view field);
absl::Status FieldMissing(const EntrySite& site, std::string_view field);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_JSON_ENTRY_H_
