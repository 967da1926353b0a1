// SPDX-License-Identifier: Apache-2.0
//
// Clients that die, stop or leave a child behind at each step of the protocol: nobody else notices, and nothing of
// theirs is left. What else a client can do to a daemon, and what a long life does, is in the other files of this test.
#include <catch2/catch.hpp>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "tests/daemon_rig.h"
#include "tests/process_counts.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr absl::Duration kGoneWithin = absl::Seconds(2);
// A process that is attached costs memory of its own on a real card.
constexpr uint64_t kRealContextBytes = 2048 * kMiB;

using Steps = std::vector<std::string>;

class SteppedClient {
 public:
  // Goes through `steps` and stands at the last.
  SteppedClient(DaemonRig& rig, const std::string& model, const Steps& steps)
      : process_(rig.StartProgram("protocol_client", {model})) {
    for (const std::string& step : steps) Go(step);
  }
  void Go(const std::string& step) {
    process_->WriteLine(step);
    const std::string answer = process_->ReadLine();
    REQUIRE(answer == step);
  }
  TestProcess& process() { return *process_; }

 private:
  std::unique_ptr<TestProcess> process_;
};

// Written once: it is large, and every daemon registers it.
struct Checkpoint {
  ScratchDirectory directory;
  std::string path = directory.path() + "/one.safetensors";
  Hashes truth = WriteCheckpoint(path, {129 * kMiB, 257, kMiB}, 21);
};

const Checkpoint& TheCheckpoint() {
  static const Checkpoint checkpoint;
  return checkpoint;
}

// A daemon with a model of so many cells that two packets carry them, and another one; on the first a client that
// nothing happens to.
struct Scene {
  DaemonRig rig{{"--pool_idle", "200ms", "--cell_bytes", "2MiB"}};
  const Hashes& truth = TheCheckpoint().truth;
  uint64_t free_bytes = 0;  // with nothing active
  std::unique_ptr<ReaderClient> survivor;
  ProcessCounts counts;  // with the survivor attached

  Scene() {
    WriteCheckpoint(rig.Path("two.safetensors"), {3 * kMiB}, 22);
    rig.Do({"register", "one", TheCheckpoint().path});
    rig.Do({"register", "two", rig.Path("two.safetensors")});
    // What the daemon needs for itself comes with the first activation and stays.
    rig.Do({"activate", "one"});
    Deactivate();
    free_bytes = rig.Device().at("free_bytes");
    survivor = std::make_unique<ReaderClient>(rig, "one");
    AwaitLeases(1);
    CHECK(survivor->Ask("hash").at("sha256") == truth);
    counts = SettledCountsOf(rig.daemon().pid());
  }
  void Deactivate() {
    rig.Do({"deactivate", "one"});
    AwaitEmptyPool();
  }
  void AwaitEmptyPool() {
    rig.Await("the pool is empty", [](const Json& status) { return status["devices"][0]["pool_idle_bytes"] == 0; });
  }
  void AwaitLeases(size_t count) {
    rig.Await(
        "the dead process's lease is gone",
        [count](const Json& status) { return status["models"][0]["leases"].size() == count; }, kGoneWithin);
  }
  // What everybody must see when nothing has happened.
  void CheckUnharmed() {
    AwaitLeases(1);
    const Json model = rig.Model("one");
    CHECK(model.at("leases")[0].at("pid") == survivor->process().pid());
    CHECK(model.at("state") == "active");
    CHECK(rig.Device().at("broker_bytes") == model.at("device_bytes"));
    CHECK(survivor->Ask("hash").at("sha256") == truth);
    CHECK(SettledCountsOf(rig.daemon().pid()).descriptors == counts.descriptors);
  }
  // Everything comes off, to the byte; and the next activation is right.
  void CheckNothingLeft() {
    Deactivate();
    rig.AwaitFree(OnSim() ? free_bytes : free_bytes - kRealContextBytes);
    CHECK(rig.Device().at("broker_bytes") == 0);
    rig.Do({"activate", "one"});
    CHECK(survivor->Ask("hash").at("sha256") == truth);
    CHECK(SettledCountsOf(rig.daemon().pid()).descriptors == counts.descriptors);
  }
};

bool InUseBy(const Json& error, pid_t pid) {
  if (error.at("code") != "FAILED_PRECONDITION" || error.at("reason") != "IN_USE") return false;
  for (const Json& holder : error.at("holders")) {
    if (holder.at("pid") == pid) return true;
  }
  return false;
}

TEST_CASE("A client that is killed at any step of an attach leaves nothing, and nobody else notices") {
  Scene scene;
  const std::vector<Steps> deaths = {
      {"hello"},
      {"hello", "activate"},
      {"hello", "activate", "grant"},
      {"hello", "activate", "grant", "receive"},
      {"hello", "activate", "grant", "receive", "import"},
      {"hello", "activate", "grant", "receive", "import", "map"},
      {"hello", "activate", "grant", "receive", "import", "map", "acknowledge"},
      {"hello", "activate", "grant", "attach"},
      {"hello", "activate", "grant", "attach", "enter"},
  };
  for (const Steps& steps : deaths) {
    INFO(absl::StrJoin(steps, ", "));
    SteppedClient victim(scene.rig, "one", steps);
    victim.process().Kill();
    scene.CheckUnharmed();
  }
  scene.CheckNothingLeft();
}

TEST_CASE("A client that is killed while it gives its cells back ends what waited for it") {
  Scene scene;
  for (const char* last : {"revoke", "take"}) {
    INFO(last);
    SteppedClient victim(scene.rig, "one", {"hello", "activate", "grant", "attach"});
    const auto deactivation = scene.rig.StartCtl({"deactivate", "one"});
    victim.Go("revoke");
    if (last == std::string("take")) victim.Go("take");
    victim.process().Kill();
    const int exit_status = deactivation->Wait(absl::Seconds(5));
    INFO(deactivation->Errors());
    CHECK(exit_status == 0);
    scene.AwaitLeases(1);
    CHECK(scene.rig.Model("one").at("leases")[0].at("state") == "revoked");
    scene.rig.Do({"activate", "one"});
    CHECK(scene.survivor->Ask("hash").at("sha256") == scene.truth);
  }
  {
    INFO("in a use that a drain waits for");
    SteppedClient victim(scene.rig, "one", {"hello", "activate", "grant", "attach", "enter"});
    const auto deactivation = scene.rig.StartCtl({"deactivate", "one", "--drain", "20s"});
    scene.rig.Await("the drain waits", [](const Json& status) {
      return status["models"][0]["state"] == "deactivating" && status["models"][0]["leases"].size() == 2;
    });
    victim.process().Kill();
    CHECK(deactivation->Wait(absl::Seconds(5)) == 0);
    CHECK(scene.rig.Model("one").at("device_bytes") == 0);
    scene.rig.Do({"activate", "one"});
  }
  scene.CheckUnharmed();
  scene.CheckNothingLeft();
}

TEST_CASE("A model comes into the place of another one as its client lets the cells go, and no sooner") {
  DaemonRig rig{{"--cell_bytes", "2MiB", "--device_budget", "8MiB"}};
  for (const char* name : {"one", "two"}) {
    WriteCheckpoint(rig.Path(std::string(name) + ".safetensors"), {5 * kMiB}, name[0]);
    rig.Do({"register", name, rig.Path(std::string(name) + ".safetensors")});
  }
  SteppedClient client(rig, "one", {"hello", "activate", "grant", "attach"});
  const auto caller = rig.StartCtl({"activate", "two", "--json"});
  for (const char* step : {"revoke", "take"}) client.Go(step);
  CHECK(rig.Model("two").at("state") == "inactive");
  client.Go("release-one");
  const auto is_filled = [](const Json& status) { return status["models"][1]["state"] == "activating"; };
  rig.Await("the filling has begun", is_filled);
  for (int i = 0; i < 5; ++i) CHECK(is_filled(rig.Status()));
  client.Go("release");
  const Json answer = Json::parse(caller->ReadAll());
  CHECK(caller->Wait() == 0);
  CHECK(answer.at("evicted") == Json{"one"});
  CHECK(rig.Do({"verify", "two"}).at("refilled_cells") == 0);
  CHECK(rig.Model("one").at("state") == "inactive");
}

TEST_CASE("A child that keeps a dead client's socket and cells keeps neither its session nor, once it ends, memory") {
  Scene scene;
  SteppedClient victim(scene.rig, "one", {"hello", "activate", "grant", "receive", "fork"});
  victim.process().Kill();
  // The page channel is still open; that the process is gone says its pidfd.
  scene.CheckUnharmed();
  const uint64_t model_bytes = scene.rig.Model("one").at("device_bytes");
  const uint64_t others_bytes = scene.rig.Device().at("others_bytes");
  scene.Deactivate();
  CHECK(scene.rig.Device().at("broker_bytes") == 0);
  if (OnSim()) {
    // The child has the descriptors of all cells: 64 in its hands, the rest in the socket.
    CHECK(scene.rig.Device().at("free_bytes") == scene.free_bytes - model_bytes);
    CHECK(scene.rig.Device().at("others_bytes") == others_bytes + model_bytes);
  }
  victim.process().EndInput();
  scene.rig.AwaitFree(OnSim() ? scene.free_bytes : scene.free_bytes - kRealContextBytes);
  scene.rig.Do({"activate", "one"});
  CHECK(scene.survivor->Ask("hash").at("sha256") == scene.truth);
  scene.CheckNothingLeft();
}

TEST_CASE(
    "A client that is stopped while it maps is named, holds up nobody else, and goes on or dies as if never stopped") {
  Scene scene;
  const bool dies = GENERATE(false, true);
  SteppedClient stopped(scene.rig, "one", {"hello", "activate", "grant", "receive"});
  stopped.process().Signal(SIGSTOP);

  const absl::Time start = absl::Now();
  CHECK(scene.rig.Do({"activate", "two"}).at("device_bytes") == 4 * kMiB);
  const Outcome attached = scene.rig.Ctl({"attach", "one", "--sha256"});
  CHECK(attached.exit_status == 0);
  // Which makes a context where there is a real card.
  CHECK(absl::Now() - start < absl::Seconds(OnSim() ? 5 : 20));
  CHECK(scene.survivor->Ask("hash").at("sha256") == scene.truth);
  const absl::Time asked = absl::Now();
  const Json error = scene.rig.Refused({"deactivate", "one", "--drain", "300ms"});
  INFO(error.dump());
  CHECK(InUseBy(error, stopped.process().pid()));
  CHECK(absl::Now() - asked < absl::Seconds(3));
  CHECK(scene.rig.Model("one").at("state") == "active");
  CHECK(scene.survivor->Ask("hash").at("sha256") == scene.truth);

  if (dies) {
    stopped.process().Kill();
  } else {
    stopped.process().Signal(SIGCONT);
    stopped.Go("attach");
    const auto deactivation = scene.rig.StartCtl({"deactivate", "one"});
    for (const char* step : {"revoke", "take", "release"}) stopped.Go(step);
    CHECK(deactivation->Wait() == 0);
    scene.rig.Do({"activate", "one"});
    stopped.process().Kill();
  }
  scene.rig.Do({"deactivate", "two"});
  scene.CheckUnharmed();
  scene.CheckNothingLeft();
}

}  // namespace
}  // namespace residency
