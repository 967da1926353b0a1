// SPDX-License-Identifier: Apache-2.0
//
// Directories: one file, shards, pipelines, and components put together by hand.
#include <catch2/catch.hpp>

#include "mechanisms/manifest.h"
#include "tests/checkpoint_fixture.h"

namespace residency {
namespace {

using Names = std::vector<std::string>;

constexpr char kShard1[] = "model-00001-of-00002.safetensors";
constexpr char kShard2[] = "model-00002-of-00002.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kWeightMap[] = R"({"metadata":{"total_size":999},"weight_map":{
  "c":"model-00002-of-00002.safetensors","a":"model-00001-of-00002.safetensors",
  "b":"model-00001-of-00002.safetensors"}})";

// Two shards, in `folder`, with a and b in the first and c in the second.
void WriteShards(CheckpointDir* directory, const std::string& folder) {
  directory->Write(folder + "/" + kShard1, SafetensorsOf({"a", "b"}));
  directory->Write(folder + "/" + kShard2, SafetensorsOf({"c"}));
  directory->Write(folder + "/" + kIndex, kWeightMap);
}

TEST_CASE("A directory with one file is that file, whatever else lies there") {
  CheckpointDir directory;
  const std::string path = directory.Write("m/weights.safetensors", SafetensorsOf({"a", "b"}));
  directory.Write("m/config.json", "{}");
  directory.Write("m/._weights.safetensors", "junk");
  const Manifest manifest = ReadGood(directory.Path("m"));
  CHECK(NamesOf(manifest) == Names{"model/a", "model/b"});
  CHECK(manifest.files[0].path == path);
}

TEST_CASE("Shards are read in the order of their names, each once") {
  CheckpointDir directory;
  WriteShards(&directory, "m");
  const Manifest manifest = ReadGood(directory.Path("m"));
  CHECK(NamesOf(manifest) == Names{"model/a", "model/b", "model/c"});
  REQUIRE(manifest.files.size() == 2);
  CHECK(manifest.files[0].path == directory.Path("m/") + kShard1);
  CHECK(manifest.components[0].tensors[2].file == 1);
}

TEST_CASE("A file that the index does not name is ignored") {
  CheckpointDir directory;
  WriteShards(&directory, "m");
  directory.Write("m/model.safetensors", SafetensorsOf({"a", "z"}));
  CHECK(NamesOf(ReadGood(directory.Path("m"))) == Names{"model/a", "model/b", "model/c"});
}

TEST_CASE("A shard that is not there is named") {
  CheckpointDir directory;
  WriteShards(&directory, "m");
  std::filesystem::remove(directory.Path("m/") + kShard2);
  const Refusal refusal = ReadBad(directory.Path("m"));
  CHECK(refusal.reason == "FILE_MISSING");
  CHECK(refusal.file == directory.Path("m/") + kShard2);
  CHECK(MessageOf(directory.Path("m")).find(kIndex) != std::string::npos);
}

TEST_CASE("An index and its shards must agree both ways") {
  CheckpointDir directory;
  WriteShards(&directory, "m");
  directory.Write(std::string("m/") + kShard2, SafetensorsOf({"c", "extra"}));
  CHECK(ReadBad(directory.Path("m")).tensor == "extra");
  directory.Write(std::string("m/") + kShard2, SafetensorsOf({"other"}));
  CHECK(ReadBad(directory.Path("m")).tensor == "other");
  // In another shard than the index says.
  directory.Write(std::string("m/") + kShard1, SafetensorsOf({"a"}));
  directory.Write(std::string("m/") + kShard2, SafetensorsOf({"c", "b"}));
  CHECK(ReadBad(directory.Path("m")).tensor == "b");
  directory.Write(std::string("m/") + kShard2, SafetensorsOf({"c"}));
  const Refusal refusal = ReadBad(directory.Path("m"));
  CHECK(refusal.reason == "BAD_INDEX");
  CHECK(refusal.tensor == "b");
  CHECK(refusal.file == directory.Path("m/") + kIndex);
  CHECK(MessageOf(directory.Path("m")).find(kShard1) != std::string::npos);
}

TEST_CASE("An index that is none, or that leaves its directory, is refused") {
  CheckpointDir directory;
  directory.Write("outside.safetensors", SafetensorsOf({"a"}));
  const std::string outside = directory.Path("outside.safetensors");
  for (const std::string& index :
       {std::string(), std::string("[]"), std::string("{"), std::string("{}"), std::string(R"({"weight_map":[]})"),
        std::string(R"({"weight_map":{"a":1}})"), std::string(R"({"weight_map":{"a":""}})"),
        std::string(R"({"weight_map":{"a":"../outside.safetensors"}})"),
        std::string(R"({"weight_map":{"a":"x/../../outside.safetensors"}})"),
        R"({"weight_map":{"a":")" + outside + R"("}})",
        std::string(R"({"weight_map":{"a":"s.safetensors","a":"s.safetensors"}})"),
        std::string(R"({"weight_map":{"a":"s.safetensors"},"weight_map":{}})")}) {
    INFO(index);
    directory.Write("m/s.safetensors", SafetensorsOf({"a"}));
    directory.Write(std::string("m/") + kIndex, index);
    const Refusal refusal = ReadBad(directory.Path("m"));
    CHECK(refusal.reason == "BAD_INDEX");
    CHECK(refusal.file == directory.Path("m/") + kIndex);
  }
}

TEST_CASE("A shard may lie in a folder below the index") {
  CheckpointDir directory;
  directory.Write("m/parts/s.safetensors", SafetensorsOf({"a"}));
  directory.Write(std::string("m/") + kIndex, R"({"weight_map":{"a":"parts/s.safetensors"}})");
  CHECK(NamesOf(ReadGood(directory.Path("m"))) == Names{"model/a"});
}

TEST_CASE("Of precision variants the plain one is taken") {
  CheckpointDir directory;
  directory.Write("m/model.fp16.safetensors", SafetensorsOf({"half"}));
  directory.Write("m/model.safetensors", SafetensorsOf({"plain"}));
  directory.Write("m/model.non_ema.safetensors", SafetensorsOf({"other"}));
  CHECK(NamesOf(ReadGood(directory.Path("m"))) == Names{"model/plain"});
  directory.Write("d/diffusion_pytorch_model.safetensors", SafetensorsOf({"plain"}));
  directory.Write("d/diffusion_pytorch_model.fp16.safetensors", SafetensorsOf({"half"}));
  CHECK(NamesOf(ReadGood(directory.Path("d"))) == Names{"model/plain"});
  directory.Write(std::string("i/") + kIndex, R"({"weight_map":{"plain":"p"}})");
  directory.Write("i/model.fp16.safetensors.index.json", "not read");
  directory.Write("i/p", SafetensorsOf({"plain"}));
  CHECK(NamesOf(ReadGood(directory.Path("i"))) == Names{"model/plain"});
}

TEST_CASE("Several files without an index are refused by name") {
  CheckpointDir directory;
  directory.Write("m/model.safetensors", SafetensorsOf({"a"}));
  directory.Write("m/consolidated.safetensors", SafetensorsOf({"b"}));
  CHECK(ReadBad(directory.Path("m")).reason == "NOT_A_CHECKPOINT");
  CHECK(MessageOf(directory.Path("m")).find("consolidated.safetensors, model.safetensors") != std::string::npos);
  directory.Write(std::string("s/") + kShard1, SafetensorsOf({"a"}));
  directory.Write(std::string("s/") + kShard2, SafetensorsOf({"b"}));
  CHECK(ReadBad(directory.Path("s")).reason == "NOT_A_CHECKPOINT");
  CHECK(MessageOf(directory.Path("s")).find("index.json") != std::string::npos);
}

TEST_CASE("A directory without safetensors is refused, and what is there instead is named") {
  CheckpointDir directory;
  directory.Write("empty/config.json", "{}");
  CHECK(ReadBad(directory.Path("empty")).reason == "NOT_A_CHECKPOINT");
  directory.Write("bin/pytorch_model.bin", "x");
  CHECK(ReadBad(directory.Path("bin")).reason == "NOT_A_CHECKPOINT");
  CHECK(MessageOf(directory.Path("bin")).find("pytorch_model.bin") != std::string::npos);
}

// A pipeline with the model_index.json `index` and the folders unet (one file) and text (shards).
std::string WritePipeline(CheckpointDir* directory, std::string_view index) {
  directory->Write("p/unet/diffusion_pytorch_model.safetensors", SafetensorsOf({"u"}));
  directory->Write("p/unet/config.json", "{}");
  WriteShards(directory, "p/text");
  directory->Write("p/tokenizer/vocab.json", "{}");
  directory->Write("p/model_index.json", index);
  return directory->Path("p");
}

TEST_CASE("A pipeline has one component for each folder with weights, in the index's order") {
  CheckpointDir directory;
  const std::string path = WritePipeline(&directory, R"({"_class_name":"P","_diffusers_version":"0.30",
      "unet":["diffusers","UNet2DConditionModel"],"tokenizer":["transformers","CLIPTokenizer"],
      "text":["transformers","CLIPTextModel"],"scheduler":["diffusers","DDIMScheduler"],
      "feature_extractor":["transformers","CLIPImageProcessor"],"tokenizer_2":["transformers","T5TokenizerFast"],
      "safety_checker":[null,null],"requires_safety_checker":true,"sizes":[1,2],"three":["a","b","c"]})");
  const Manifest manifest = ReadGood(path);
  CHECK(NamesOf(manifest) == Names{"unet/u", "text/a", "text/b", "text/c"});
  CHECK(manifest.files.size() == 3);
}

TEST_CASE("A pipeline's folder with weights that is not there is missed") {
  CheckpointDir directory;
  const std::string path =
      WritePipeline(&directory, R"({"unet":["diffusers","UNet2DConditionModel"],"vae":["diffusers","AutoencoderKL"]})");
  const Refusal refusal = ReadBad(path);
  CHECK(refusal.reason == "FILE_MISSING");
  CHECK(refusal.file == path + "/vae");
}

TEST_CASE("Weights in another format are not left out in silence") {
  CheckpointDir directory;
  directory.Write("p/vae/diffusion_pytorch_model.bin", "x");
  const std::string path =
      WritePipeline(&directory, R"({"unet":["diffusers","UNet2DConditionModel"],"vae":["diffusers","AutoencoderKL"]})");
  CHECK(ReadBad(path).reason == "NOT_A_CHECKPOINT");
  CHECK(ReadBad(path).file == path + "/vae");
}

TEST_CASE("A model_index.json that is none is refused") {
  CheckpointDir directory;
  for (const char* index : {"", "[]", "{", R"({"../unet":["a","b"]})", R"({"/unet":["a","b"]})",
                            R"({"unet":["a","b"],"unet":["a","b"]})", R"({"model_index.json":["a","b"]})"}) {
    INFO(index);
    CHECK(ReadBad(WritePipeline(&directory, index)).reason == "BAD_INDEX");
  }
  CHECK(ReadBad(WritePipeline(&directory, "{}")).reason == "NOT_A_CHECKPOINT");
  CHECK(ReadBad(WritePipeline(&directory, R"({"tokenizer":["a","CLIPTokenizer"]})")).reason == "NOT_A_CHECKPOINT");
}

TEST_CASE("The same folder under two names is refused") {
  CheckpointDir directory;
  CHECK(ReadBad(WritePipeline(&directory, R"({"unet":["a","b"],"./unet":["a","b"]})")).reason == "DUPLICATE_NAME");
}

TEST_CASE("A tree of symbolic links is followed, and paths stay as found") {
  CheckpointDir directory;
  directory.Write("blobs/1111", SafetensorsOf({"a"}));
  directory.Write("blobs/2222", R"({"x":["l","UNet"],"y":["l","UNet"]})");
  directory.Link("snapshots/rev/model_index.json", "../../blobs/2222");
  directory.Link("snapshots/rev/x/model.safetensors", "../../../blobs/1111");
  // The same content twice is the same blob; each component has it as its own.
  directory.Link("snapshots/rev/y/model.safetensors", "../../../blobs/1111");
  const Manifest manifest = ReadGood(directory.Path("snapshots/rev"));
  CHECK(NamesOf(manifest) == Names{"x/a", "y/a"});
  REQUIRE(manifest.files.size() == 2);
  CHECK(manifest.files[0].path == directory.Path("snapshots/rev/x/model.safetensors"));
  CHECK(manifest.files[0].inode == manifest.files[1].inode);
  directory.Link("model.safetensors", "blobs/3333");
  CHECK(ReadBad(directory.Path("model.safetensors")).reason == "NO_SUCH_FILE");
}

TEST_CASE("Components are cut out of one file by name, and the file is listed once") {
  CheckpointDir directory;
  const std::string path =
      directory.Write("all.safetensors", SafetensorsOf({"unet.in", "vae.x", "unet.out/y", "vae.z"}));
  const Manifest manifest = ReadGood("", {{"vae", path, "vae.*"}, {"unet", path, "unet.*"}});
  CHECK(NamesOf(manifest) == Names{"vae/vae.x", "vae/vae.z", "unet/unet.in", "unet/unet.out/y"});
  CHECK(manifest.files.size() == 1);
  CHECK(NamesOf(ReadGood("", {{"one", path, "?ae.[xy]"}})) == Names{"one/vae.x"});
}

TEST_CASE("Components add to the source") {
  CheckpointDir directory;
  WriteShards(&directory, "m");
  const std::string adapter = directory.Write("adapter.safetensors", SafetensorsOf({"a"}));
  CHECK(NamesOf(ReadGood(directory.Path("m"), {{"lora", adapter, ""}})) ==
        Names{"model/a", "model/b", "model/c", "lora/a"});
  CHECK(NamesOf(ReadGood("", {{"x", directory.Path("m"), "[bc]"}})) == Names{"x/b", "x/c"});
}

TEST_CASE("Components that clash or find nothing are refused") {
  CheckpointDir directory;
  const std::string path = directory.Write("all.safetensors", SafetensorsOf({"a", "b"}));
  const std::string other = directory.Write("other.safetensors", SafetensorsOf({"a"}));
  CHECK(ReadBad("", {{"x", path, "c*"}}).reason == "NO_MATCH");
  CHECK(MessageOf("", {{"x", path, "c*"}}).find("c*") != std::string::npos);
  CHECK(ReadBad("", {{"x", path, ""}, {"x", other, ""}}).reason == "DUPLICATE_NAME");
  CHECK(ReadBad(path, {{"model", other, ""}}).reason == "DUPLICATE_NAME");
  CHECK(ReadBad("", {{"", path, ""}}).reason == "BAD_COMPONENT");
  // One tensor in two components would be in memory twice.
  const Refusal twice = ReadBad("", {{"x", path, "a"}, {"y", path, "*"}});
  CHECK(twice.reason == "DUPLICATE_NAME");
  CHECK(twice.tensor == "a");
  CHECK(ReadBad(path, {{"x", path, "a"}}).reason == "DUPLICATE_NAME");
  CHECK(ReadBad("", {{"x", directory.Path("nothing"), ""}}).reason == "NO_SUCH_FILE");
}

TEST_CASE("A pipeline as one component must not have a name twice") {
  CheckpointDir directory;
  directory.Write("p/x/model.safetensors", SafetensorsOf({"same"}));
  directory.Write("p/y/model.safetensors", SafetensorsOf({"same", "other"}));
  directory.Write("p/model_index.json", R"({"x":["l","A"],"y":["l","A"]})");
  CHECK(ReadBad("", {{"all", directory.Path("p"), ""}}).tensor == "same");
  CHECK(NamesOf(ReadGood("", {{"all", directory.Path("p"), "o*"}})) == Names{"all/other"});
}

}  // namespace
}  // namespace residency
