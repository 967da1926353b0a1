// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints that transformers, peft and safetensors wrote, against what the reference reader found in them.
#include <catch2/catch.hpp>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "mechanisms/manifest.h"
#include "tests/checkpoint_fixture.h"

namespace residency {
namespace {

const std::string kRoot = "tests/data/real/";

nlohmann::json Truth() {
  std::ifstream file(kRoot + "truth.json");
  REQUIRE(file.good());
  return nlohmann::json::parse(file);
}

// The format's name for PyTorch's.
DType FromTorch(const std::string& name) {
  const std::map<std::string, DType> kNames = {{"float32", DType::kF32},
                                               {"float16", DType::kF16},
                                               {"bfloat16", DType::kBF16},
                                               {"int64", DType::kI64},
                                               {"float8_e4m3fn", DType::kF8E4M3}};
  REQUIRE(kNames.count(name) == 1);
  return kNames.at(name);
}

// Holds every tensor of `manifest` against the truth of its file, and counts that none is left out.
void CheckAgainstTruth(const Manifest& manifest, const nlohmann::json& truth) {
  size_t expected = 0;
  for (const SourceFile& file : manifest.files) expected += truth.at(file.path.substr(kRoot.size())).size();
  size_t found = 0;
  for (const ManifestComponent& component : manifest.components) {
    for (const ManifestTensor& tensor : component.tensors) {
      const std::string file = manifest.files[tensor.file].path.substr(kRoot.size());
      INFO(file << " " << tensor.name);
      const nlohmann::json& entry = truth.at(file).at(tensor.name);
      CHECK(tensor.dtype == FromTorch(entry.at("dtype")));
      CHECK(tensor.shape == entry.at("shape").get<std::vector<uint64_t>>());
      CHECK(tensor.bytes == entry.at("bytes").get<uint64_t>());
      CHECK(tensor.file_offset + tensor.bytes <= manifest.files[tensor.file].bytes);
      ++found;
    }
  }
  CHECK(found == expected);
}

TEST_CASE("Every file that other libraries wrote is read as the reference reader reads it") {
  const nlohmann::json truth = Truth();
  REQUIRE(truth.size() == 16);
  for (const auto& [file, tensors] : truth.items()) {
    INFO(file);
    const Manifest manifest = ReadGood(kRoot + file);
    CHECK(manifest.components[0].tensors.size() == tensors.size());
    CheckAgainstTruth(manifest, truth);
  }
}

TEST_CASE("Every checkpoint that other libraries wrote is found whole") {
  const nlohmann::json truth = Truth();
  size_t files = 0;
  for (const char* name : {"flux-like", "llama-sharded", "llama-lora", "whisper-fp16"}) {
    INFO(name);
    const Manifest manifest = ReadGood(kRoot + name);
    CheckAgainstTruth(manifest, truth);
    files += manifest.files.size();
  }
  CHECK(files == truth.size());
}

TEST_CASE("A pipeline that diffusers would load has the four components with weights") {
  const Manifest manifest = ReadGood(kRoot + "flux-like");
  std::vector<std::string> names;
  for (const ManifestComponent& component : manifest.components) names.push_back(component.name);
  CHECK(names == std::vector<std::string>{"text_encoder", "text_encoder_2", "transformer", "vae"});
}

}  // namespace
}  // namespace residency
