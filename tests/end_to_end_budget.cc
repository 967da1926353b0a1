// SPDX-License-Identifier: Apache-2.0
//
// Models that do not fit, at all or beside each other.
#include <catch2/catch.hpp>
#include <string>

#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kBudgetBytes = 96 * kMiB;

std::vector<std::string> Budget() { return {"--device_budget", std::to_string(kBudgetBytes)}; }

TEST_CASE("A model that is larger than the budget is refused with both figures before anything moves") {
  DaemonRig rig(Budget());
  WriteCheckpoint(rig.Path("big.safetensors"), {97 * kMiB}, 3);
  const Json registered = rig.Do({"register", "big", rig.Path("big.safetensors")});
  const uint64_t needed_bytes =
      registered.at("payload_bytes").get<uint64_t>() + registered.at("tax_bytes").get<uint64_t>();
  const uint64_t free_bytes = rig.Device().at("free_bytes");

  const auto check_nothing_happened = [&] {
    const Json status = rig.Status();
    const Json& device = status.at("devices")[0];
    CHECK(device.at("broker_bytes") == 0);
    CHECK(device.at("pool_idle_bytes") == 0);
    CHECK(device.at("budget_bytes") == kBudgetBytes);
    if (OnSim()) CHECK(device.at("free_bytes") == free_bytes);
    CHECK(status.at("models")[0].at("state") == "inactive");
    CHECK(status.at("models")[0].at("generation") == 0);
  };
  for (const char* command : {"activate", "attach"}) {
    const Json error = rig.Refused({command, "big"});
    INFO(error.dump());
    CHECK(error.at("code") == "RESOURCE_EXHAUSTED");
    CHECK(error.at("reason") == "GPU_BUDGET");
    CHECK(error.at("needed_bytes") == needed_bytes);
    CHECK(error.at("available_bytes") == kBudgetBytes);
    CHECK(error.at("holders").empty());
    check_nothing_happened();
  }

  // The caller's own budget is as firm, also for a model that would fit.
  WriteCheckpoint(rig.Path("small.safetensors"), {9 * kMiB}, 4);
  rig.Do({"register", "small", rig.Path("small.safetensors")});
  const Json error = rig.Refused({"activate", "small", "--device_budget", "4MiB"});
  INFO(error.dump());
  CHECK(error.at("code") == "RESOURCE_EXHAUSTED");
  CHECK(error.at("reason") == "GPU_BUDGET");
  CHECK(error.at("available_bytes") == 4 * kMiB);
  CHECK(rig.Device().at("broker_bytes") == 0);
  CHECK(rig.Do({"activate", "small", "--device_budget", "10MiB"}).at("device_bytes") == 10 * kMiB);
}

TEST_CASE("A second model waits for nobody: it is refused while the first is in use and evicts it afterwards") {
  DaemonRig rig(Budget());
  const Hashes first_truth = WriteCheckpoint(rig.Path("first.safetensors"), {60 * kMiB}, 5);
  const Hashes second_truth = WriteCheckpoint(rig.Path("second.safetensors"), {50 * kMiB}, 6);
  rig.Do({"register", "first", rig.Path("first.safetensors")});
  rig.Do({"register", "second", rig.Path("second.safetensors")});
  ReaderClient reader(rig, "first");
  reader.Ask("use");

  const Json error = rig.Refused({"activate", "second"});
  INFO(error.dump());
  CHECK(error.at("code") == "FAILED_PRECONDITION");
  CHECK(error.at("reason") == "IN_USE");
  CHECK(error.at("needed_bytes") == 50 * kMiB);
  CHECK(error.at("available_bytes") == 36 * kMiB);
  REQUIRE(error.at("holders").size() == 1);
  CHECK(error.at("holders")[0].at("pid") == reader.process().pid());
  CHECK(error.at("holders")[0].at("client") == "reader_client");
  CHECK(rig.Model("second").at("state") == "inactive");
  CHECK(reader.Ask("hash").at("sha256") == first_truth);

  reader.Ask("leave");
  ReaderClient second(rig, "second");
  CHECK(second.Ask("hash").at("sha256") == second_truth);
  CHECK(rig.Model("first").at("state") == "inactive");
  CHECK(rig.Model("first").at("leases")[0].at("state") == "revoked");
  CHECK(rig.Device().at("broker_bytes") == rig.Model("second").at("device_bytes"));

  const Json back = rig.Do({"activate", "first"});
  CHECK(back.at("evicted") == Json::array({"second"}));
  CHECK(reader.Ask("hash").at("sha256") == first_truth);
}

}  // namespace
}  // namespace residency
