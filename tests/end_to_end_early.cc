// SPDX-License-Identifier: Apache-2.0
//
// `register --activate`: a model that is brought onto its GPU while it is still being registered. Only the simulated
// driver can be told to take long over the last bytes, or to refuse them.
#include <catch2/catch.hpp>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/daemon_rig.h"
#include "tests/read_back.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
// So many components that one of them is less than the sixteenth that may be missing when a fill begins. Each is
// page-locked by a call of its own, on the device as on the host 2 MiB.
constexpr int kComponents = 20;

// Writes the model's files, and returns the command that registers and activates it.
std::vector<std::string> WriteModel(DaemonRig& rig, const std::string& name, uint64_t seed, Hashes& truth) {
  std::vector<std::string> command = {"register", name, "--activate"};
  for (int i = 0; i < kComponents; ++i) {
    const std::string path = rig.Path(absl::StrCat(name, i));
    const std::string tensor = absl::StrCat("w", i);
    truth.merge(WriteNamedCheckpoint(path, {{tensor, kMiB}}, seed + static_cast<uint64_t>(i)));
    command.insert(command.end(), {"--component", absl::StrCat("c", i, "=", path)});
  }
  return command;
}

uint64_t CellsOnGpu(const Json& model) {
  uint64_t cells = 0;
  for (const Json& component : model.at("components")) cells += component.at("cells_on_gpu").get<uint64_t>();
  return cells;
}

// Waits until some of the model is on the GPU while not all of it is page-locked.
void AwaitFilling(DaemonRig& rig) {
  rig.Await("it is filled while its last piece is being page-locked", [](const Json& status) {
    const Json& models = status.at("models");
    return models.size() == 1 && models[0].at("state") == "activating" && CellsOnGpu(models[0]) > 0 &&
           models[0].at("pinned_bytes") < kComponents * 2 * kMiB;
  });
}

void AwaitNothing(DaemonRig& rig) {
  rig.Await("nothing of it is left", [](const Json& status) {
    return status.at("models").empty() && status.at("host").at("pinned_bytes") == 0 &&
           status.at("devices")[0].at("broker_bytes") == 0;
  });
}

TEST_CASE("A model is on the GPU when it is registered, having been filled while its last bytes came") {
  DaemonRig rig({"--sim_faults=cuMemHostRegister@20=+2s,cuMemHostRegister@40=+2s,cuMemHostRegister@60=+2s"});
  Hashes truth;
  std::vector<std::string> command = WriteModel(rig, "early", 100, truth);
  command.insert(command.begin(), "--json");
  const auto registering = rig.StartCtl(command);
  AwaitFilling(rig);
  const Json registered = Json::parse(registering->ReadAll());
  CHECK(registering->Wait() == 0);
  CHECK(registered.at("pinned_bytes") == kComponents * 2 * kMiB);
  CHECK(registered.at("activation").at("verified_cells") == kComponents);
  CHECK(registered.at("activation").at("lease_id") == 0);
  CHECK(rig.Model("early").at("state") == "active");
  CHECK(ReadBack(rig, "early") == truth);
  CHECK(rig.Do({"verify", "early"}).at("refilled_cells") == 0);
  CHECK(rig.Do({"unload", "early"}).at("host_bytes") == kComponents * 2 * kMiB);

  // Unloaded under the fill.
  const auto unloaded = rig.StartCtl(command);
  AwaitFilling(rig);
  rig.Do({"unload", "early"});
  CHECK(Json::parse(unloaded->ReadAll()).at("error").at("reason") == "UNLOADED");
  CHECK(unloaded->Wait() == 1);
  AwaitNothing(rig);

  // Given up under the fill.
  const auto given_up = rig.StartCtl(command);
  AwaitFilling(rig);
  given_up->Signal(SIGINT);
  CHECK(given_up->Wait() != 0);
  AwaitNothing(rig);
  CHECK(rig.Do({command.begin() + 1, command.end()}).at("activation").at("verified_cells") == kComponents);
}

TEST_CASE("A daemon that ends while a model is filled from what is being read ends in time") {
  DaemonRig rig({"--sim_faults=cuMemHostRegister@20=+2s"});
  Hashes truth;
  const auto registering = rig.StartCtl(WriteModel(rig, "early", 200, truth));
  AwaitFilling(rig);
  rig.daemon().Signal(SIGTERM);
  CHECK(rig.daemon().Wait(absl::Seconds(5)) == 0);
  CHECK(registering->Wait() != 0);
}

TEST_CASE("Page-locking that is refused under a fill fails the model that insists on it, and no other") {
  DaemonRig rig({absl::StrCat("--sim_faults=pin_limit=", kComponents * 2 * kMiB - 1)});
  Hashes truth;
  std::vector<std::string> command = WriteModel(rig, "early", 300, truth);
  command.insert(command.end(), {"--pin", "yes"});
  CHECK(rig.Refused(command).at("reason") == "PIN_LIMIT");
  AwaitNothing(rig);
  command.back() = "auto";
  const Json registered = rig.Do(command);
  CHECK(registered.at("pin").at("reason") == "refused");
  CHECK(registered.at("activation").at("verified_cells") == kComponents);
  CHECK(ReadBack(rig, "early") == truth);
  // Nothing of what was locked meanwhile stays so: a set that takes nearly all of the limit can be.
  WriteCheckpoint(rig.Path("other"), {(kComponents - 1) * 2 * kMiB}, 301);
  CHECK(rig.Do({"register", "other", rig.Path("other"), "--pin", "yes"}).at("pin").at("pinned") == true);
}

TEST_CASE("What is not read for long, or is registered already, is activated after that, as its kind is") {
  DaemonRig rig;
  const std::string path = rig.Path("small");
  const Hashes truth = WriteCheckpoint(path, {3 * kMiB, 77}, 401);
  CHECK(rig.Do({"register", "small", path, "--activate"}).at("activation").at("verified_cells") == 1);
  CHECK(ReadBack(rig, "small") == truth);
  // It was there.
  CHECK(rig.Do({"register", "small", path, "--activate"}).at("activation").at("bytes_moved") == 0);
  rig.Do({"deactivate", "small"});
  CHECK(rig.Do({"register", "small", path, "--activate"}).at("activation").at("verified_cells") == 1);
  const Json file = rig.Do({"register", "file", path, "--activate", "--host_tier", "file"});
  CHECK(file.at("activation").at("trusted_cells") == 1);
  const Json phased = rig.Do({"register", "phased", path, "--activate", "--phased"});
  CHECK(phased.at("activation").at("mode") == "phased");
  CHECK(phased.at("activation").at("bytes_moved") == 0);
  CHECK_FALSE(rig.Do({"register", "plain", path}).contains("activation"));
  CHECK(rig.Ctl({"register", "plain", path, "--activate", "--dry_run"}).exit_status == 2);
}

TEST_CASE("A model that has no room on the GPU stays registered, and both is told") {
  DaemonRig rig({"--device_budget=8MiB"});
  Hashes truth;
  const std::vector<std::string> command = WriteModel(rig, "large", 500, truth);
  const Outcome text = rig.Ctl(command);
  CHECK(text.exit_status == 1);
  CHECK(absl::StrContains(text.output, "registered large on "));
  CHECK(absl::StrContains(text.output, "large is registered, but not activated\n"));
  CHECK(absl::StrContains(text.errors, "residencyctl: RESOURCE_EXHAUSTED/GPU_BUDGET: large needs "));
  CHECK(rig.Model("large").at("state") == "inactive");
  std::vector<std::string> json = {"--json"};
  json.insert(json.end(), command.begin(), command.end());
  const Outcome again = rig.Ctl(json);
  CHECK(again.exit_status == 1);
  const Json document = again.Document();
  CHECK(document.at("error").at("reason") == "GPU_BUDGET");
  CHECK(document.at("registered").at("payload_bytes") == kComponents * kMiB);
  CHECK_FALSE(document.at("registered").contains("activation"));
}

}  // namespace
}  // namespace residency
