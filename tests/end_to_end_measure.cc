// SPDX-License-Identifier: Apache-2.0
//
// What is shown and decided on is what the driver says, and what comes back is what was there: through swaps too.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/daemon_rig.h"
#include "tests/process_counts.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
// Of what the driver says of free memory, on a card that other processes and the driver itself use too.
constexpr uint64_t kToleranceBytes = 64 * kMiB;

TEST_CASE("Three models have what the driver says they have, and a fourth that fits what is left evicts nobody") {
  // Together 48 + 66 + 90 MiB of cells, and a fourth that takes the rest of the budget to the byte.
  const std::vector<uint64_t> payload_bytes = {47 * kMiB + 1, 66 * kMiB, 89 * kMiB + 3};
  const std::vector<uint64_t> cell_bytes = {48 * kMiB, 66 * kMiB, 90 * kMiB};
  DaemonRig rig({"--device_budget", "264MiB"});
  for (size_t i = 0; i < payload_bytes.size(); ++i) {
    const std::string name = "m" + std::to_string(i);
    WriteCheckpoint(rig.Path(name + ".safetensors"), {payload_bytes[i]}, 50 + i);
    rig.Do({"register", name, rig.Path(name + ".safetensors")});
  }
  WriteCheckpoint(rig.Path("fourth.safetensors"), {60 * kMiB}, 60);
  rig.Do({"register", "fourth", rig.Path("fourth.safetensors")});
  // What the daemon needs for itself to fill and digest comes with the first activation and stays.
  rig.Do({"activate", "m0"});
  rig.Do({"deactivate", "m0"});
  const Json before = rig.Device();
  const uint64_t before_bytes = before.at("free_bytes").get<uint64_t>() + before.at("pool_idle_bytes").get<uint64_t>();

  uint64_t sum_bytes = 0;
  for (size_t i = 0; i < payload_bytes.size(); ++i) {
    const std::string name = "m" + std::to_string(i);
    CHECK(rig.Do({"activate", name}).at("device_bytes") == cell_bytes[i]);
    CHECK(rig.Model(name).at("device_bytes") == cell_bytes[i]);
    sum_bytes += cell_bytes[i];
    const Json device = rig.Device();
    CHECK(device.at("broker_bytes") == sum_bytes);
    const uint64_t now_bytes = device.at("free_bytes").get<uint64_t>() + device.at("pool_idle_bytes").get<uint64_t>();
    const uint64_t dropped_bytes = before_bytes - std::min(before_bytes, now_bytes);
    CHECK(std::max(dropped_bytes, sum_bytes) - std::min(dropped_bytes, sum_bytes) <= (OnSim() ? 0 : kToleranceBytes));
  }
  const Json fourth = rig.Do({"activate", "fourth"});
  CHECK(fourth.at("evicted").empty());
  CHECK(fourth.at("device_bytes") == 60 * kMiB);
  for (const Json& model : rig.Status().at("models")) CHECK(model.at("state") == "active");
}

TEST_CASE("A budget that was given is kept when a later call gives none, and what is done is not done again") {
  DaemonRig rig;
  WriteCheckpoint(rig.Path("one.safetensors"), {9 * kMiB}, 61);
  rig.Do({"register", "one", rig.Path("one.safetensors")});
  CHECK(rig.Do({"activate", "one", "--device_budget", "11MiB"}).at("bytes_moved") == 10 * kMiB);
  for (const std::vector<std::string>& again :
       {std::vector<std::string>{"activate", "one"}, {"activate", "one", "--device_budget", "64MiB"}}) {
    const Json answer = rig.Do(again);
    CHECK(answer.at("bytes_moved") == 0);
    CHECK(answer.at("generation") == 1);
    const Json model = rig.Model("one");
    CHECK(model.at("budget").at("device_bytes") == 11 * kMiB);
    CHECK(model.at("device_bytes") == 10 * kMiB);
  }
  CHECK(rig.Do({"deactivate", "one"}).at("pooled_bytes") == 10 * kMiB);
  const Json device = rig.Device();
  for (int i = 0; i < 2; ++i) {
    const Json answer = rig.Do({"deactivate", "one"});
    CHECK(answer.at("pooled_bytes") == 0);
    CHECK(answer.at("freed_bytes") == 0);
    CHECK(answer.at("copied_bytes") == 0);
  }
  CHECK(rig.Device().at("pool_idle_bytes") == device.at("pool_idle_bytes"));
  // Also after it was off its GPU, until another one is given; that of the registration holds beside it.
  rig.Do({"activate", "one"});
  CHECK(rig.Model("one").at("budget").at("device_bytes") == 11 * kMiB);
  rig.Do({"deactivate", "one"});
  rig.Do({"activate", "one", "--device_budget", "20MiB"});
  CHECK(rig.Model("one").at("budget").at("device_bytes") == 20 * kMiB);
  rig.Do({"register", "capped", rig.Path("one.safetensors"), "--device_budget", "12MiB"});
  rig.Do({"activate", "capped", "--device_budget", "64MiB"});
  CHECK(rig.Model("capped").at("budget").at("device_bytes") == 12 * kMiB);
}

TEST_CASE(
    "Two models that take each other's place are whole every time, though their readers' threads are on another GPU") {
  // Room for one of them at a time.
  std::vector<std::string> flags = {"--device_budget", "40MiB", "--cell_bytes", "4MiB"};
  if (OnSim()) flags.insert(flags.end(), {"--sim_devices", "2"});
  DaemonRig rig(flags);
  const Hashes first_truth = WriteCheckpoint(rig.Path("first.safetensors"), {20 * kMiB, 257, 5 * kMiB + 3}, 71);
  const Hashes second_truth = WriteCheckpoint(rig.Path("second.safetensors"), {1, 30 * kMiB - 2}, 72);
  const std::string uuid = rig.Device().at("uuid");
  for (const char* name : {"first", "second"}) {
    rig.Do({"register", name, rig.Path(std::string(name) + ".safetensors"), "--device", uuid});
  }
  ReaderClient first(rig, "first");
  ReaderClient second(rig, "second");
  for (ReaderClient* reader : {&first, &second}) CHECK(reader->Ask("elsewhere") == Json::object());
  for (const char* name : {"first", "second"}) rig.Do({"deactivate", name});
  // 20 activations: each first comes onto an empty card, each second in the first one's place.
  for (int round = 0; round < 10; ++round) {
    INFO(round);
    CHECK(rig.Do({"activate", "first"}).at("evicted").empty());
    CHECK(first.Ask("hash").at("sha256") == first_truth);
    CHECK(rig.Do({"activate", "second"}).at("evicted") == Json::array({"first"}));
    CHECK(second.Ask("hash").at("sha256") == second_truth);
    const Json verified = rig.Do({"verify", "second"});
    CHECK(verified.at("refilled_cells") == 0);
    CHECK(verified.at("absent_cells") == 0);
    rig.Do({"deactivate", "second"});
  }
}

TEST_CASE("The daemon measures without NVML: it loads none of it, and shows nothing that only NVML could say") {
  DaemonRig rig;
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  rig.Do({"activate", "flux"});
  const auto attached = rig.StartCtl({"attach", "flux"});
  rig.Await("the lease is live", [](const Json& status) {
    const Json& leases = status["models"][0]["leases"];
    return leases.size() == 1 && leases[0]["state"] == "live";
  });
  const Json status = rig.Status();
  const Json& device = status.at("devices")[0];
  CHECK(device.at("broker_bytes") == status.at("models")[0].at("device_bytes"));
  CHECK(device.at("broker_bytes").get<uint64_t>() > 0);
  for (const char* absent : {"contexts_bytes", "processes"}) CHECK_FALSE(device.contains(absent));
  CHECK(absl::StrContains(device.at("not_measured").get<std::string>(), "NVML"));
  CHECK_FALSE(status.at("models")[0].at("leases")[0].contains("measured_bytes"));
  for (const std::string& file : MappedFiles(rig.daemon().pid())) {
    INFO(file);
    CHECK_FALSE(absl::StrContains(file, "libnvidia-ml"));
  }
  attached->EndInput();
  CHECK(attached->Wait() == 0);
  rig.Do({"deactivate", "flux"});
}

}  // namespace
}  // namespace residency
