// SPDX-License-Identifier: Apache-2.0
//
// Components that are cut out of files, and the same tensors out of files of several formats.
#include <openssl/sha.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/daemon_rig.h"
#include "tests/input_cases.h"
#include "tests/registrar.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr size_t kMessageBytes = size_t{4} << 20;  // gRPC's own limit on what a client takes

Json ReadBack(DaemonRig& rig, const std::string& model) {
  ReaderClient reader(rig, model);
  const Json read = reader.Ask("hash");
  INFO(read.dump());
  REQUIRE(read.contains("sha256"));
  return read.at("sha256");
}

TEST_CASE("Components are cut out of a single file by the names of their tensors, and the rest is left where it is") {
  Registrar registrar;
  DaemonRig& rig = registrar.rig();
  const std::string path = rig.Path("all.safetensors");
  const Hashes truth = WriteNamedCheckpoint(path,
                                            {{"first_stage_model.encoder.w", 70'001},
                                             {"cond_stage_model.w", 1'000},
                                             {"first_stage_model.decoder.w", 5},
                                             {"model.diffusion_model.w", 3'000'000},
                                             {"model_ema.w", 17}},
                                            11);
  const Json registered = rig.Do({"register", "sd", "--component", absl::StrCat("vae=", path, "#first_stage_model.*"),
                                  "--component", absl::StrCat("text=", path, "#cond_stage_model.*")});
  CHECK(registered.at("tensors") == 3);
  CHECK(registered.at("payload_bytes") == 70'001 + 5 + 1'000);

  const Json components = rig.Model("sd").at("components");
  REQUIRE(components.size() == 2);
  CHECK(components[0].at("name") == "vae");
  CHECK(components[0].at("tensors") == 2);
  CHECK(components[0].at("payload_bytes") == 70'001 + 5);
  CHECK(components[1].at("name") == "text");
  CHECK(components[1].at("payload_bytes") == 1'000);
  const Json read = ReadBack(rig, "sd");
  CHECK(read.size() == 3);
  for (const char* name : {"first_stage_model.encoder.w", "first_stage_model.decoder.w", "cond_stage_model.w"}) {
    INFO(name);
    CHECK(read.value(name, "none") == truth.at(name));
  }

  const Memory before = registrar.Measure();
  const Json nothing = rig.Refused({"register", "x", "--component", absl::StrCat("unet=", path, "#unet.*")});
  INFO(nothing.dump());
  CHECK(nothing.at("code") == "INVALID_ARGUMENT");
  CHECK(nothing.at("reason") == "NO_MATCH");
  CHECK(nothing.at("file") == path);
  for (const char* word : {"unet.*", "component unet"}) {
    CHECK(absl::StrContains(nothing.at("message").get<std::string>(), word));
  }
  // A tensor is in one component, also where the whole file is the model.
  for (const std::vector<std::string>& twice :
       {std::vector<std::string>{"register", "x", "--component", absl::StrCat("vae=", path, "#first_stage_model.*"),
                                 "--component", absl::StrCat("decoder=", path, "#*.decoder.*")},
        std::vector<std::string>{"register", "x", path, "--component", absl::StrCat("d=", path, "#*.decoder.*")}}) {
    const Json refused = rig.Refused(twice);
    INFO(refused.dump());
    CHECK(refused.at("reason") == "DUPLICATE_NAME");
    CHECK(refused.at("tensor") == "first_stage_model.decoder.w");
    CHECK(refused.at("file") == path);
  }
  CHECK(rig.Ctl({"register", "x", "--component", path}).exit_status == 2);
  CHECK(registrar.Measure() == before);
}

// What the tensors of the three forms are. No two have the same bytes.
struct Weight {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
  uint32_t gguf_type;
  uint64_t bytes;
};
const std::vector<Weight> kWeights = {{"token_embd.weight", "F32", {33, 7}, 0, 924},
                                      {"blk.0.attn_q.weight", "F16", {5, 3, 2}, 1, 60},
                                      {"blk.0.scale", "I8", {13}, 24, 13},
                                      {"blk.0.ffn.weight", "BF16", {1024, 65}, 30, 133'120},
                                      {"output_norm.weight", "F64", {3}, 28, 24}};

std::string Little(uint64_t value, int bytes) {
  std::string text;
  for (int shift = 0; shift < 8 * bytes; shift += 8) text.push_back(static_cast<char>(value >> shift));
  return text;
}

std::string Bytes(const Weight& weight) {
  std::string bytes;
  for (uint64_t i = 0; i < weight.bytes; ++i) {
    bytes.push_back(static_cast<char>((i * 31 + weight.bytes * 17 + (i >> 8) * 7) & 0xff));
  }
  return bytes;
}

std::string Sha256(const std::string& bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), sizeof(digest)});
}

// A file, and where each of kWeights begins in it.
struct Form {
  std::string image;
  std::vector<uint64_t> offsets;

  void Append(const Weight& weight) {
    offsets.push_back(image.size());
    image += Bytes(weight);
  }
};

Form AsSafetensors() {
  nlohmann::ordered_json header;
  uint64_t end = 0;
  for (const Weight& weight : kWeights) {
    header[weight.name] = {
        {"dtype", weight.dtype}, {"shape", weight.shape}, {"data_offsets", {end, end + weight.bytes}}};
    end += weight.bytes;
  }
  const std::string text = header.dump();
  Form form{Little(text.size(), 8) + text, {}};
  for (const Weight& weight : kWeights) form.Append(weight);
  return form;
}

// With something between them, at any offset.
Form AsBlob() {
  Form form;
  for (const Weight& weight : kWeights) {
    form.image.append(form.offsets.size() + 1, '~');
    form.Append(weight);
  }
  form.image.append(9, '~');
  return form;
}

// Version 3 of the format, little-endian: magic, version, counts, key-value pairs, tensor infos with the innermost
// dimension first and offsets into the data, and the data, each tensor of it at a multiple of general.alignment.
Form AsGguf() {
  constexpr uint64_t kAlignment = 64;
  constexpr uint32_t kUint32 = 4;
  constexpr uint32_t kString = 8;
  const auto text = [](const std::string& value) { return Little(value.size(), 8) + value; };
  Form form;
  const auto pad = [&form] { form.image.append((kAlignment - form.image.size() % kAlignment) % kAlignment, '\0'); };
  form.image = "GGUF" + Little(3, 4) + Little(kWeights.size(), 8) + Little(2, 8);
  form.image += text("general.architecture") + Little(kString, 4) + text("llama");
  form.image += text("general.alignment") + Little(kUint32, 4) + Little(kAlignment, 4);
  uint64_t offset = 0;
  for (const Weight& weight : kWeights) {
    form.image += text(weight.name) + Little(weight.shape.size(), 4);
    for (auto dimension = weight.shape.rbegin(); dimension != weight.shape.rend(); ++dimension) {
      form.image += Little(*dimension, 8);
    }
    form.image += Little(weight.gguf_type, 4) + Little(offset, 8);
    offset += (weight.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  for (const Weight& weight : kWeights) {
    pad();
    form.Append(weight);
  }
  pad();
  return form;
}

void Write(const std::string& path, const std::string& image) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << image;
  file.close();
  REQUIRE(file.good());
}

// NAME.tensors.json of `form`, which lies beside it as `file`.
std::string TableOf(const Form& form, const std::string& file) {
  Json rows = Json::array();
  for (size_t i = 0; i < kWeights.size(); ++i) {
    rows.push_back({{"name", kWeights[i].name},
                    {"dtype", kWeights[i].dtype},
                    {"shape", kWeights[i].shape},
                    {"file", file},
                    {"offset", form.offsets[i]},
                    {"bytes", kWeights[i].bytes}});
  }
  return Json{{"tensors", rows}}.dump();
}

TEST_CASE("The same tensors as safetensors, as a table over a blob and as one over a GGUF file are the same model") {
  Registrar registrar;
  DaemonRig& rig = registrar.rig();
  Write(rig.Path("plain.safetensors"), AsSafetensors().image);
  Write(rig.Path("weights.bin"), AsBlob().image);
  Write(rig.Path("blob.tensors.json"), TableOf(AsBlob(), "weights.bin"));
  Write(rig.Path("model.gguf"), AsGguf().image);
  Write(rig.Path("gguf.tensors.json"), TableOf(AsGguf(), "model.gguf"));

  const auto plain = registrar.Register("plain", rig.Path("plain.safetensors"));
  REQUIRE(plain.ok());
  const v1::ListTensorsResponse plain_table = registrar.ListTensors("plain").at(0);
  REQUIRE(plain_table.tensors_size() == static_cast<int>(kWeights.size()));
  const Json plain_read = ReadBack(rig, "plain");
  CHECK(plain_read.size() == kWeights.size());
  for (const char* name : {"blob", "gguf"}) {
    INFO(name);
    const auto registered = registrar.Register(name, rig.Path(absl::StrCat(name, ".tensors.json")));
    INFO(registered.status().ToString());
    REQUIRE(registered.ok());
    CHECK(registered->payload_bytes() == plain->payload_bytes());
    CHECK(registered->tax_bytes() == plain->tax_bytes());
    const v1::ListTensorsResponse table = registrar.ListTensors(name).at(0);
    CHECK(table.layout_digest() == plain_table.layout_digest());
    CHECK(table.SerializeAsString() == plain_table.SerializeAsString());
    CHECK(ReadBack(rig, name) == plain_read);
  }
  // Not just equal, but right.
  for (const Weight& weight : kWeights) CHECK(plain_read.value(weight.name, "none") == Sha256(Bytes(weight)));
  // A GGUF file by itself is refused, and the refusal says what to do.
  const Refusal refusal = registrar.Refused("alone", rig.Path("model.gguf"), absl::StatusCode::kInvalidArgument);
  CHECK(refusal.reason == "NOT_A_CHECKPOINT");
  CHECK(absl::StrContains(std::string(registrar.last_status().message()), "NAME.tensors.json"));
}

const InputCase& TinyTensors() {
  for (const InputCase& input : InputCases()) {
    if (input.name == "ok_20000_tiny_tensors") return input;
  }
  throw std::logic_error("no such case");
}

TEST_CASE("A table of tensors that is larger than a message comes in pieces below gRPC's limit") {
  Registrar registrar;
  DaemonRig& rig = registrar.rig();
  std::vector<NamedBytes> tensors;
  for (int i = 0; i < 5'000; ++i) tensors.push_back({absl::StrCat(std::string(1'000, 'n'), i), 1});
  // The longest names that a model may have.
  for (int i = 0; i < 10; ++i) tensors.push_back({absl::StrCat(std::string(4'095, 'n'), i), 1});
  WriteNamedCheckpoint(rig.Path("long.safetensors"), tensors, 12);
  REQUIRE(registrar.Register("long", rig.Path("long.safetensors")).ok());

  size_t all_bytes = 0;
  int listed = 0;
  for (const v1::ListTensorsResponse& piece : registrar.ListTensors("long")) {
    CHECK(piece.ByteSizeLong() < kMessageBytes);
    all_bytes += piece.ByteSizeLong();
    listed += piece.tensors_size();
  }
  CHECK(all_bytes > kMessageBytes);
  CHECK(listed == static_cast<int>(tensors.size()));
  CHECK(rig.Do({"tensors", "long"}).at("tensors").size() == tensors.size());
}

// gRPC keeps a thread that sleeps in such a case, not in each; of four daemons one or two had it.
TEST_CASE("A daemon that has just sent large answers ends as soon as it is told to") {
  for (int round = 0; round < 4; ++round) {
    Registrar registrar;
    DaemonRig& rig = registrar.rig();
    REQUIRE(registrar.Register("tiny", TinyTensors().path).ok());
    ReaderClient reader(rig, "tiny");
    rig.Do({"tensors", "tiny"});
    reader.process().Kill();
    rig.daemon().Signal(SIGTERM);
    CHECK(rig.daemon().Wait(absl::Seconds(5)) == 0);
  }
}

}  // namespace
}  // namespace residency
