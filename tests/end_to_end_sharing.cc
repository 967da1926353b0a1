// SPDX-License-Identifier: Apache-2.0
//
// Several processes on one copy, and what becomes of it as they and the model come and go.
#include <catch2/catch.hpp>
#include <csignal>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

bool InUse(const Json& error, pid_t pid) {
  const std::string message = error.at("message");
  return error.at("code") == "FAILED_PRECONDITION" && error.at("reason") == "IN_USE" &&
         error.at("holders").size() == 1 && error.at("holders")[0].at("pid") == pid &&
         message.find(std::to_string(pid)) != std::string::npos;
}

// A daemon with one model of more than a cell, and a device that shows what is free at once.
struct OneModel {
  DaemonRig rig{{"--pool_idle", "200ms"}};
  Hashes truth = WriteCheckpoint(rig.Path("one.safetensors"), {65 * kMiB, 257, 20 * kMiB}, 11);
  uint64_t free_bytes = 0;

  OneModel() {
    rig.Do({"register", "one", rig.Path("one.safetensors")});
    // What the daemon needs for itself to fill and digest comes with the first activation and stays.
    rig.Do({"activate", "one"});
    rig.Do({"deactivate", "one"});
    rig.Await("the pool is empty", [](const Json& status) { return status["devices"][0]["pool_idle_bytes"] == 0; });
    free_bytes = rig.Device().at("free_bytes");
  }
  uint64_t BrokerBytes() { return rig.Device().at("broker_bytes"); }
};

TEST_CASE("Two processes share one copy, and each outlives the other's sudden death") {
  OneModel one;
  const uint64_t first_dies = GENERATE(0u, 1u);
  ReaderClient first(one.rig, "one");
  const uint64_t shared_bytes = one.BrokerBytes();
  CHECK(shared_bytes == one.rig.Model("one").at("device_bytes"));
  ReaderClient second(one.rig, "one");
  CHECK(one.BrokerBytes() == shared_bytes);
  const Json leases = one.rig.Model("one").at("leases");
  REQUIRE(leases.size() == 2);
  CHECK(leases[0].at("pid") == first.process().pid());
  CHECK(leases[1].at("pid") == second.process().pid());
  CHECK(leases[0].at("state") == "live");
  CHECK(leases[1].at("state") == "live");
  CHECK(leases[1].at("claimed_mapped_bytes") == shared_bytes);
  CHECK(first.Ask("hash").at("sha256") == one.truth);
  CHECK(second.Ask("hash").at("sha256") == one.truth);

  ReaderClient& victim = first_dies == 1 ? first : second;
  ReaderClient& survivor = first_dies == 1 ? second : first;
  victim.process().Kill();
  CHECK(survivor.Ask("hash").at("sha256") == one.truth);
  const auto leases_left = [&](size_t count) {
    one.rig.Await(
        "the dead process's lease is gone",
        [count](const Json& status) { return status["models"][0]["leases"].size() == count; }, absl::Seconds(2));
  };
  leases_left(1);
  CHECK(one.rig.Model("one").at("leases")[0].at("pid") == survivor.process().pid());
  CHECK(survivor.Ask("hash").at("sha256") == one.truth);
  CHECK(one.BrokerBytes() == shared_bytes);

  survivor.process().Kill();
  leases_left(0);
  CHECK(one.rig.Model("one").at("state") == "active");
  const Json gone = one.rig.Do({"deactivate", "one"});
  CHECK(gone.at("copied_bytes") == 0);
  CHECK(one.BrokerBytes() == 0);
  one.rig.AwaitFree(one.free_bytes);
}

TEST_CASE("An idle client's lease survives a deactivation without memory, and its addresses come to life again") {
  OneModel one;
  ReaderClient reader(one.rig, "one");
  const Json before = reader.Ask("hash");
  CHECK(before.at("sha256") == one.truth);
  // A process with a context of its own takes memory too on a real card.
  const uint64_t active_free_bytes = one.rig.Device().at("free_bytes");
  const uint64_t model_bytes = one.rig.Model("one").at("device_bytes");

  const Json gone = one.rig.Do({"deactivate", "one"});
  CHECK(gone.at("copied_bytes") == 0);
  CHECK(gone.at("pooled_bytes").get<uint64_t>() + gone.at("freed_bytes").get<uint64_t>() == model_bytes);
  const Json model = one.rig.Model("one");
  CHECK(model.at("state") == "inactive");
  CHECK(model.at("device_bytes") == 0);
  CHECK(model.at("claimed_device_bytes") == 0);
  CHECK(model.at("components_on_gpu") == 0);
  CHECK(model.at("components_partly_on_gpu") == 0);
  REQUIRE(model.at("leases").size() == 1);
  CHECK(model.at("leases")[0].at("state") == "revoked");
  CHECK(model.at("leases")[0].at("claimed_mapped_bytes") == 0);
  CHECK(one.BrokerBytes() == 0);
  one.rig.AwaitFree(active_free_bytes + model_bytes);
  CHECK(one.rig.Device().at("pool_idle_bytes") == 0);

  reader.Send("hash");
  CHECK_FALSE(reader.process().HasLineWithin(absl::Milliseconds(200)));
  const Json activated = one.rig.Do({"activate", "one"});
  CHECK(activated.at("bytes_moved").get<uint64_t>() >= 85 * kMiB);
  const Json after = reader.Answer();
  INFO(after.dump());
  CHECK(after.at("sha256") == one.truth);
  CHECK(after.at("addresses") == before.at("addresses"));
  CHECK(after.at("generation").get<uint64_t>() > before.at("generation").get<uint64_t>());
  CHECK(one.rig.Model("one").at("leases")[0].at("state") == "live");
}

TEST_CASE("A deactivation gives up on a stopped client after its bound and succeeds once that goes on") {
  OneModel one;
  ReaderClient reader(one.rig, "one");
  reader.process().Signal(SIGSTOP);
  const absl::Time start = absl::Now();
  const Json error = one.rig.Refused({"deactivate", "one"});
  const absl::Duration waited = absl::Now() - start;
  INFO(error.dump());
  CHECK(InUse(error, reader.process().pid()));
  CHECK(waited >= absl::Seconds(4));
  CHECK(waited < absl::Seconds(8));
  CHECK(one.rig.Model("one").at("state") == "active");
  CHECK(one.rig.Do({"verify", "one"}).at("absent_cells") == 0);

  reader.process().Signal(SIGCONT);
  CHECK(reader.Ask("hash").at("sha256") == one.truth);
  one.rig.Do({"deactivate", "one"});
  CHECK(one.BrokerBytes() == 0);
  one.rig.Do({"activate", "one"});
  CHECK(reader.Ask("hash").at("sha256") == one.truth);
}

TEST_CASE("A model in use is not taken away, and the refusal names who uses it") {
  OneModel one;
  const auto user = one.rig.StartCtl({"attach", "one", "--use", "60s"});
  one.rig.Await("the attached process uses the model", [](const Json& status) {
    const Json& leases = status["models"][0]["leases"];
    return leases.size() == 1 && leases[0]["in_use"] == true;
  });
  const Json at_once = one.rig.Refused({"deactivate", "one"});
  INFO(at_once.dump());
  CHECK(InUse(at_once, user->pid()));

  const absl::Time start = absl::Now();
  const Json drained = one.rig.Refused({"deactivate", "one", "--drain", "300ms"});
  const absl::Duration waited = absl::Now() - start;
  INFO(drained.dump());
  CHECK(InUse(drained, user->pid()));
  CHECK(waited >= absl::Milliseconds(300));
  CHECK(waited < absl::Seconds(3));

  CHECK(one.rig.Model("one").at("state") == "active");
  CHECK(one.rig.Model("one").at("leases")[0].at("in_use") == true);
  user->Signal(SIGTERM);
  CHECK(user->Wait() == 0);
  one.rig.Do({"deactivate", "one"});
  CHECK(one.BrokerBytes() == 0);
}

TEST_CASE("A client reads on through a drain that fails, and a drain that is long enough ends with its use") {
  OneModel one;
  ReaderClient reader(one.rig, "one");
  reader.Ask("use");
  CHECK(InUse(one.rig.Refused({"deactivate", "one", "--drain", "200ms"}), reader.process().pid()));
  CHECK(reader.Ask("hash").at("sha256") == one.truth);
  CHECK(reader.Ask("leave") == Json::object());
  CHECK(reader.Ask("hash").at("sha256") == one.truth);

  reader.Ask("use");
  const auto deactivation = one.rig.StartCtl({"deactivate", "one", "--drain", "20s"});
  CHECK_FALSE(deactivation->EndsWithin(absl::Milliseconds(200)));
  CHECK(one.rig.Model("one").at("state") == "deactivating");
  CHECK(reader.Ask("hash").at("sha256") == one.truth);
  CHECK(reader.Ask("leave") == Json::object());
  CHECK(deactivation->Wait() == 0);
  CHECK(one.rig.Model("one").at("device_bytes") == 0);
}

TEST_CASE("A client whose kernel writes into the weights loses its own context, and not one byte changes") {
  DaemonRig rig;
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  ReaderClient other(rig, "flux");
  ReaderClient scribbler(rig, "flux");
  CHECK(scribbler.Ask("hash").at("sha256") == TrueHashes("flux-like"));
  const Json error = scribbler.Ask("scribble").at("error");
  INFO(error.dump());
  CHECK(error.at("reason") == "DEVICE_LOST");
  CHECK(scribbler.Ask("hash").at("error").at("reason") == "DEVICE_LOST");

  CHECK(other.Ask("hash").at("sha256") == TrueHashes("flux-like"));
  const Json verified = rig.Do({"verify", "flux"});
  CHECK(verified.at("verified_cells").get<uint64_t>() > 0);
  CHECK(verified.at("refilled_cells") == 0);
  CHECK(rig.Status().at("daemon").at("serving") == true);
  // The daemon's context and the other client's still do everything.
  scribbler.process().Kill();
  rig.Do({"deactivate", "flux", "--drain", "5s"});
  CHECK(rig.Do({"activate", "flux"}).at("refilled_cells") == 0);
  CHECK(other.Ask("hash").at("sha256") == TrueHashes("flux-like"));
}

TEST_CASE("A client that loses its context by its own fault costs nobody else anything") {
  DaemonRig rig;
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  ReaderClient other(rig, "flux");
  ReaderClient poisoned(rig, "flux");
  const Json error = poisoned.Ask("poison").at("error");
  INFO(error.dump());
  CHECK(error.at("reason") == "DEVICE_LOST");
  CHECK(poisoned.Ask("hash").at("error").at("reason") == "DEVICE_LOST");

  CHECK(other.Ask("hash").at("sha256") == TrueHashes("flux-like"));
  CHECK(rig.Do({"verify", "flux"}).at("refilled_cells") == 0);
  CHECK(rig.Status().at("daemon").at("serving") == true);
  rig.Do({"register", "llama", RealCheckpoint("llama-lora")});
  ReaderClient late(rig, "llama");
  CHECK(late.Ask("hash").at("sha256") == TrueHashes("llama-lora"));
  // What it had mapped is nobody's problem once it is gone.
  poisoned.process().Kill();
  rig.Do({"deactivate", "flux", "--drain", "5s"});
  CHECK(rig.Do({"activate", "flux"}).at("refilled_cells") == 0);
  CHECK(other.Ask("hash").at("sha256") == TrueHashes("flux-like"));
}

}  // namespace
}  // namespace residency
