// SPDX-License-Identifier: Apache-2.0
//
// Files as people have them, good and bad, through a real daemon: the verdict, in time; what a refusal says; and
// memory as it was before. The files and the right verdicts are of tests/make_cases.py. More of it, by noun, is in the
// files checkpoint_input_*.cc.
#include <algorithm>
#include <catch2/catch.hpp>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/daemon_rig.h"
#include "tests/input_cases.h"
#include "tests/registrar.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kTensorAlignment = 256;

// What a refusal has to say beside its reason.
struct Said {
  std::vector<std::string> tensors;  // it names one of them; none: it names no tensor
  std::vector<std::string> words;    // its message has all of them
};

// Cases by name; of those that are accepted nothing is said.
using Group = std::map<std::string, Said>;

const Group kElementCounts = {{"ok_scalar_0d", {}},
                              {"ok_zero_dim", {}},
                              {"bad_empty_range_but_one_element", {{"w"}, {"4 bytes"}}},
                              {"edge_no_tensors", {}}};
const Group kRanges = {{"bad_shape_larger_than_range", {{"t"}, {"4000000 bytes"}}},
                       {"bad_truncated_data", {{"b"}, {"16", "15 bytes"}}},
                       {"bad_header_only", {{"t"}, {"4000000", "0 bytes"}}},
                       {"bad_begin_after_end", {{"a"}, {"8"}}},
                       {"bad_negative_offset", {{"a"}, {"-8"}}},
                       {"bad_gap", {{"b"}, {"12", "8"}}},
                       {"bad_first_not_at_zero", {{"a"}, {"8"}}},
                       {"bad_three_offsets", {{"w"}, {"data_offsets"}}}};
const Group kArithmetic = {{"bad_shape_wraps_to_zero", {{"t"}, {"4294967296"}}},
                           {"bad_shape_times_width_wraps", {{"t"}, {"2305843009213693952"}}},
                           {"bad_negative_dim", {{"t"}, {"-1"}}},
                           {"bad_float_dim", {{"t"}, {"1.0"}}},
                           {"bad_header_len_u64_max", {{}, {"18446744073709551615"}}}};
const Group kOwners = {{"bad_alias_same_range", {{"k_proj", "v_proj"}, {"inside another tensor"}}}};
const Group kNoHeader = {{"bad_header_len_100mb_plus_1", {{}, {"100000001", "100000000"}}},
                         {"bad_lfs_pointer", {{}, {"Git LFS pointer"}}},
                         {"bad_html_error_page", {{}, {"web page"}}},
                         {"bad_zero_bytes", {{}, {"empty"}}},
                         {"bad_seven_bytes", {{}, {"7 bytes"}}},
                         {"bad_header_past_eof", {{}, {"4096"}}}};
const Group kMetadata = {{"ok_metadata_strings", {}},
                         {"ok_metadata_empty", {}},
                         {"ok_metadata_null", {}},
                         {"bad_metadata_number", {{}, {"step"}}},
                         {"bad_double_document", {{}, {"JSON"}}}};
const Group kOddOffsets = {{"ok_odd_header_length", {}}, {"ok_f32_after_odd_u8", {}}};
const Group kDTypes = {{"ok_every_dtype", {}}, {"bad_lowercase_dtype", {{"w"}, {"f32"}}}};
const Group kShards = {{"ok_sharded", {}},
                       {"bad_shard_missing", {{}, {"model-00002-of-00002.safetensors", "index.json"}}},
                       {"bad_index_names_absent_tensor", {{"mtp.fc.weight"}, {"model-00002-of-00002.safetensors"}}},
                       {"ok_stray_file_beside_index", {}},
                       {"ok_index_total_size_wrong", {}}};
const Group kHeaders = {{"bad_not_json", {{}, {"JSON"}}},
                        {"bad_header_is_array", {{}, {"{"}}},
                        {"bad_header_not_utf8", {{}, {"UTF-8"}}},
                        {"bad_missing_dtype", {{"w"}, {"dtype"}}},
                        {"ok_extra_key_in_entry", {}},
                        {"ok_header_order_differs", {}},
                        {"ok_plain", {}}};
const Group kTinyTensors = {{"ok_20000_tiny_tensors", {}}};
const std::vector<const Group*> kGroups = {&kElementCounts, &kRanges, &kArithmetic, &kOwners,  &kNoHeader,   &kMetadata,
                                           &kOddOffsets,    &kDTypes, &kShards,     &kHeaders, &kTinyTensors};

// Our reasons, and the generator's names for the same.
const std::multimap<std::string, std::string> kClassesOfReasons = {
    {"HEADER_TOO_SMALL", "HEADER_TOO_SMALL"},
    {"HEADER_TOO_LARGE", "HEADER_TOO_LARGE"},
    {"NOT_A_CHECKPOINT", "NOT_SAFETENSORS"},
    {"BAD_HEADER", "HEADER_NOT_JSON"},
    {"BAD_HEADER", "TENSOR_ENTRY_MALFORMED"},
    {"BAD_METADATA", "METADATA_NOT_STRING_MAP"},
    {"BAD_DTYPE", "DTYPE_UNKNOWN"},
    {"BAD_SHAPE", "SHAPE_INVALID"},
    {"BAD_SHAPE", "SHAPE_OVERFLOW"},
    {"BAD_OFFSETS", "OFFSETS_INVALID"},
    {"SIZE_MISMATCH", "OFFSETS_SIZE_MISMATCH"},
    {"TRUNCATED", "FILE_TRUNCATED"},
    {"FILE_MISSING", "SHARD_MISSING"},
    {"BAD_INDEX", "INDEX_TENSOR_MISSING"},
};

bool IsOneOf(const std::set<std::string>& classes, const std::string& reason) {
  const auto [begin, end] = kClassesOfReasons.equal_range(reason);
  return std::any_of(begin, end, [&](const auto& row) { return classes.contains(row.second); });
}

const InputCase& Find(const std::string& name) {
  const std::vector<InputCase>& cases = InputCases();
  const auto found = std::find_if(cases.begin(), cases.end(), [&](const auto& input) { return input.name == name; });
  REQUIRE(found != cases.end());
  return *found;
}

// A daemon that judges files.
class Files {
 public:
  Registrar& registrar() { return registrar_; }
  void Check(const InputCase& input, const Said& said);
  void Check(const Group& group) {
    for (const auto& [name, said] : group) Check(Find(name), said);
  }

 private:
  void CheckRefused(const InputCase& input, const Said& said);
  void CheckAccepted(const InputCase& input);
  void CheckTable(const InputCase& input);
  void CheckBytes(const InputCase& input);

  Registrar registrar_;
};

void Files::CheckRefused(const InputCase& input, const Said& said) {
  const Refusal refusal = registrar_.Refused(
      "input", input.path,
      input.classes.contains("SHARD_MISSING") ? absl::StatusCode::kNotFound : absl::StatusCode::kInvalidArgument);
  INFO(registrar_.last_status().ToString());
  // The generator leaves it to the broker whether a model may be without tensors.
  CHECK((input.verdict == Verdict::kEither ? refusal.reason == "EMPTY_MODEL" : IsOneOf(input.classes, refusal.reason)));
  // In a directory it is one of its files.
  CHECK(absl::StartsWith(refusal.file, input.path));
  if (said.tensors.empty()) {
    CHECK(refusal.tensor.empty());
  } else {
    CHECK(std::count(said.tensors.begin(), said.tensors.end(), refusal.tensor) == 1);
  }
  for (const std::string& word : said.words) {
    INFO(word);
    CHECK(absl::StrContains(std::string(registrar_.last_status().message()), word));
  }
  CHECK(registrar_.Status().models().empty());
}

void Files::CheckTable(const InputCase& input) {
  std::map<std::string, v1::Tensor> listed;
  uint64_t tensor_count = 0;
  uint64_t payload_bytes = 0;
  for (const v1::ListTensorsResponse& piece : registrar_.ListTensors("input")) {
    for (const v1::Tensor& tensor : piece.tensors()) {
      if (tensor.device_offset() % kTensorAlignment != 0) FAIL_CHECK(tensor.ShortDebugString());
      ++tensor_count;
      payload_bytes += tensor.bytes();
      listed[tensor.name()] = tensor;
    }
  }
  CHECK(tensor_count == input.tensor_count);
  CHECK(payload_bytes == input.payload_bytes);
  for (const TrueTensor& truth : input.tensors) {
    INFO(truth.name);
    const v1::Tensor& tensor = listed[truth.name];
    CHECK(tensor.dtype() == truth.dtype);
    CHECK(std::vector<uint64_t>(tensor.shape().begin(), tensor.shape().end()) == truth.shape);
    CHECK(tensor.bytes() == truth.bytes);
  }
}

// What a client process reads back from the device.
void Files::CheckBytes(const InputCase& input) {
  ReaderClient reader(registrar_.rig(), "input");
  const Json read = reader.Ask("hash");
  INFO(read.value("error", Json()).dump());
  REQUIRE(read.contains("sha256"));
  CHECK(read.at("sha256").size() == input.tensor_count);
  for (const TrueTensor& truth : input.tensors) {
    INFO(truth.name);
    CHECK(read.at("sha256").value(truth.name, "none") == truth.sha256);
  }
  for (const auto& [name, address] : read.at("addresses").items()) {
    if (address.get<uint64_t>() % kTensorAlignment != 0) FAIL_CHECK(name << " at " << address);
  }
  reader.process().EndInput();
  CHECK(reader.process().Wait() == 0);
}

void Files::CheckAccepted(const InputCase& input) {
  const auto registered = registrar_.Register("input", input.path);
  INFO(registered.status().ToString());
  REQUIRE(registered.ok());
  CHECK(registrar_.verdict_time() < kVerdictTime);
  CHECK(registered->tensors() == input.tensor_count);
  CHECK(registered->payload_bytes() == input.payload_bytes);
  CheckTable(input);
  CheckBytes(input);
  registrar_.Unload("input");
}

void Files::Check(const InputCase& input, const Said& said) {
  INFO(input.name << ": " << input.why);
  const Memory before = registrar_.Measure();
  if (input.verdict == Verdict::kAccept) {
    CheckAccepted(input);
  } else {
    CheckRefused(input, said);
  }
  CHECK(registrar_.Measure() == before);
  CHECK_FALSE(registrar_.rig().daemon().EndsWithin(absl::ZeroDuration()));
}

TEST_CASE("A scalar is one element, a zero in a shape is none, and equal offsets are for none only") {
  Files().Check(kElementCounts);
}

TEST_CASE("Ranges that do not match the shapes, each other or the file's size are refused, naming the tensor") {
  Files().Check(kRanges);
}

TEST_CASE("Sizes that wrap in 64 bits, and dimensions that are no whole numbers, are refused as written") {
  Files().Check(kArithmetic);
}

TEST_CASE("Two names for the same bytes of a file are refused") { Files().Check(kOwners); }

TEST_CASE("A file that does not begin with a header is refused for what it really is") { Files().Check(kNoHeader); }

TEST_CASE("Empty and null metadata are taken, metadata that is no text is refused") { Files().Check(kMetadata); }

TEST_CASE("Tensors at odd offsets of the file begin at multiples of 256 on the device") { Files().Check(kOddOffsets); }

TEST_CASE("All 22 types of the format are moved as they are, and an unknown one is refused") { Files().Check(kDTypes); }

TEST_CASE("A shard or a tensor that an index promises is missed by name; the index's total and stray files are not") {
  Files().Check(kShards);
}

TEST_CASE("A header is one JSON object in UTF-8, in any order, with keys to spare") { Files().Check(kHeaders); }

TEST_CASE("Twenty thousand tiny tensors are charged three granules, to the byte, and listed in pieces") {
  Files files;
  Registrar& registrar = files.registrar();
  const InputCase& input = Find("ok_20000_tiny_tensors");
  files.Check(kTinyTensors);

  const uint64_t free_bytes = registrar.Status().devices(0).free_bytes();
  const Json unpooled = registrar.rig().Status();
  const uint64_t pooled_bytes = unpooled.at("devices")[0].at("pool_idle_bytes");
  const auto registered = registrar.Register("tiny", input.path);
  REQUIRE(registered.ok());
  registrar.rig().Do({"activate", "tiny"});
  const v1::Status status = registrar.Status();
  const v1::ModelStatus& model = status.models(0);
  CHECK(model.payload_bytes() == 80'000);
  CHECK(model.device_bytes() <= 6 * kMiB);
  CHECK(model.payload_bytes() + model.tax_bytes() == model.device_bytes());
  CHECK(model.claimed_device_bytes() == model.device_bytes());
  CHECK(registered->tax_bytes() == model.tax_bytes());
  // What the driver has no longer free is what the model is charged, and what a client maps.
  const v1::DeviceStatus& device = status.devices(0);
  CHECK(device.broker_bytes() == model.device_bytes());
  CHECK(free_bytes + pooled_bytes - device.free_bytes() - device.pool_idle_bytes() == model.device_bytes());
  ReaderClient reader(registrar.rig(), "tiny");
  CHECK(registrar.Status().models(0).leases(0).claimed_mapped_bytes() == model.device_bytes());

  const Json table = registrar.rig().Do({"tensors", "tiny"});
  REQUIRE(table.at("tensors").size() == 20'000);
  CHECK(table.at("tensors")[19'999].at("name") == "t.19999");
}

TEST_CASE("Every file of the generator is judged, and one daemon takes them all without keeping anything") {
  Files files;
  std::map<std::string, int> groups_with;
  std::map<std::string, Said> said_by_name;
  for (const Group* group : kGroups) {
    for (const auto& [name, said] : *group) {
      ++groups_with[name];
      said_by_name[name] = said;
    }
  }
  CHECK(InputCases().size() == 46);
  const Memory before = files.registrar().Measure();
  for (const InputCase& input : InputCases()) {
    INFO(input.name);
    CHECK(groups_with[input.name] == 1);
    files.Check(input, said_by_name[input.name]);
  }
  CHECK(groups_with.size() == InputCases().size());
  CHECK(files.registrar().Measure() == before);
}

}  // namespace
}  // namespace residency
