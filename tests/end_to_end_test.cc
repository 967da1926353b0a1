// SPDX-License-Identifier: Apache-2.0
//
// The daemon, its command line and client processes, as a user has them: what is on the device is what the checkpoint's
// writer knows. More of it, by noun, is in the files end_to_end_*.cc.
#include <catch2/catch.hpp>
#include <filesystem>
#include <set>
#include <string>

#include "client/client.h"
#include "client/grpc_status.h"
#include "tests/daemon_rig.h"
#include "tests/read_back.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::set<std::string> Differences(const Hashes& a, const Hashes& b) {
  std::set<std::string> names;
  for (const auto& [name, hash] : a) {
    if (!b.contains(name) || b.at(name) != hash) names.insert(name);
  }
  for (const auto& [name, hash] : b) {
    if (!a.contains(name)) names.insert(name);
  }
  return names;
}

// The table of `residencyctl tensors` in the truth's terms.
std::vector<TrueTensor> ListedTensors(DaemonRig& rig, const std::string& model, bool pipeline) {
  const Json table = rig.Do({"tensors", model});
  std::vector<TrueTensor> listed;
  for (const Json& tensor : table.at("tensors")) {
    const std::string component = table.at("components").at(tensor.at("component").get<size_t>());
    listed.push_back({.component = pipeline ? component : "",
                      .name = tensor.at("name"),
                      .dtype = tensor.at("dtype"),
                      .shape = tensor.at("shape").get<std::vector<uint64_t>>(),
                      .bytes = tensor.at("bytes")});
  }
  return listed;
}

using TensorKey = std::tuple<std::string, std::string, std::string, std::vector<uint64_t>, uint64_t>;

std::set<TensorKey> Keys(const std::vector<TrueTensor>& tensors) {
  std::set<TensorKey> keys;
  for (const TrueTensor& tensor : tensors) {
    keys.insert({tensor.component, tensor.name, tensor.dtype, tensor.shape, tensor.bytes});
  }
  return keys;
}

void FlipBit(DaemonRig& rig, const std::string& model, const std::string& tensor, uint64_t byte) {
  const auto process = rig.StartProgram("flip_bit", {model, tensor, std::to_string(byte)});
  const int exit_status = process->Wait();
  INFO(process->Errors());
  REQUIRE(exit_status == 0);
}

TEST_CASE("Every tensor of every checkpoint is on the device as the library that wrote it knows it") {
  DaemonRig rig;
  for (const std::string& folder : kRealCheckpoints) {
    INFO(folder);
    const std::vector<TrueTensor> truth = TrueTensors(folder);
    uint64_t payload_bytes = 0;
    for (const TrueTensor& tensor : truth) payload_bytes += tensor.bytes;

    const Json registered = rig.Do({"register", folder, RealCheckpoint(folder)});
    CHECK(registered.at("tensors") == truth.size());
    CHECK(registered.at("payload_bytes") == payload_bytes);
    CHECK(Keys(ListedTensors(rig, folder, folder == "flux-like")) == Keys(truth));

    const Json activated = rig.Do({"activate", folder});
    CHECK(activated.at("bytes_moved").get<uint64_t>() >= payload_bytes);
    CHECK(activated.at("verified_cells").get<uint64_t>() > 0);
    CHECK(activated.at("refilled_cells") == 0);
    CHECK(Differences(ReadBack(rig, folder), TrueHashes(folder)).empty());
  }
}

TEST_CASE("A bit that is wrong in a cell changes one tensor alone, and verify puts it right") {
  DaemonRig rig;
  const Hashes truth = TrueHashes("flux-like");
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  rig.Do({"activate", "flux"});
  const std::vector<TrueTensor> tensors = TrueTensors("flux-like");
  for (const std::string component : {"text_encoder_2", "transformer", "vae"}) {
    // The last byte of the last one, the middle of the others: neighbours would show.
    for (auto tensor = tensors.rbegin(); tensor != tensors.rend(); ++tensor) {
      if (tensor->component != component) continue;
      const std::string shown = truth.contains(tensor->name) ? tensor->name : component + "/" + tensor->name;
      INFO(shown);
      FlipBit(rig, "flux", component + "/" + tensor->name, component == "vae" ? tensor->bytes - 1 : tensor->bytes / 2);
      CHECK(Differences(ReadBack(rig, "flux"), truth) == std::set<std::string>{shown});

      const Json repaired = rig.Do({"verify", "flux"});
      CHECK(repaired.at("refilled_cells") == 1);
      CHECK(repaired.at("absent_cells") == 0);
      CHECK(Differences(ReadBack(rig, "flux"), truth).empty());
      const Json again = rig.Do({"verify", "flux"});
      CHECK(again.at("refilled_cells") == 0);
      CHECK(again.at("verified_cells").get<uint64_t>() >= 4);
      break;
    }
  }
}

TEST_CASE("A model of several cells is read with progress, and what becomes of its file afterwards does not matter") {
  DaemonRig rig;
  const std::string path = rig.Path("large.safetensors");
  const Hashes truth = WriteCheckpoint(path, {100 * kMiB, 1, 30 * kMiB + 3, 70 * kMiB - 4}, 7);

  auto client = Client::Connect({rig.runtime_dir(), "end_to_end_test", absl::Seconds(5)});
  REQUIRE(client.ok());
  grpc::ClientContext context;
  v1::RegisterModelRequest request;
  request.set_name("large");
  request.set_source(path);
  const auto stream = (*client)->service().RegisterModel(&context, request);
  std::vector<v1::RegisterModelResponse> messages;
  for (v1::RegisterModelResponse message; stream->Read(&message);) messages.push_back(message);
  const absl::Status status = FromGrpcStatus(stream->Finish());
  INFO(status.ToString());
  REQUIRE(status.ok());
  REQUIRE(messages.size() >= 2);
  for (size_t i = 1; i < messages.size(); ++i) {
    CHECK_FALSE(messages[i - 1].done());
    CHECK(messages[i - 1].bytes_done() <= messages[i].bytes_done());
  }
  CHECK(messages.back().done());
  CHECK(messages.back().bytes_done() == 200 * kMiB);
  CHECK(messages.back().payload_bytes() == 200 * kMiB);
  CHECK(messages.back().tensors() == truth.size());

  std::filesystem::resize_file(path, 5);
  rig.Do({"activate", "large"});
  CHECK(Differences(ReadBack(rig, "large"), truth).empty());
  rig.Do({"deactivate", "large"});
  std::filesystem::remove(path);
  rig.Do({"activate", "large"});
  CHECK(Differences(ReadBack(rig, "large"), truth).empty());
}

}  // namespace
}  // namespace residency
