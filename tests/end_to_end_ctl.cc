// SPDX-License-Identifier: Apache-2.0
//
// residencyctl: what it shows, and how it ends when something is wrong.
#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

void CheckHas(const Json& object, std::initializer_list<const char*> fields) {
  for (const char* field : fields) {
    INFO(field << " in " << object.dump());
    CHECK(object.contains(field));
  }
}

// What the documentation of the command line promises.
void CheckFields(const Json& status) {
  CheckHas(status, {"daemon", "host", "devices", "models"});
  CheckHas(status.at("daemon"),
           {"version", "pid", "epoch", "driver", "serving", "uptime_seconds", "oldest_transition_seconds"});
  CheckHas(status.at("host"), {"pinned_bytes"});
  for (const Json& device : status.at("devices")) {
    CheckHas(device,
             {"uuid", "name", "state", "total_bytes", "free_bytes", "budget_bytes", "reserve_bytes", "broker_bytes",
              "pool_idle_bytes", "others_bytes", "working_bytes", "measured_in_microseconds", "draining", "processes"});
  }
  for (const Json& model : status.at("models")) {
    CheckHas(model, {"name", "state", "mode", "device_uuid", "generation", "epoch", "payload_bytes", "tax_bytes",
                     "pinned_bytes", "budget", "claimed_device_bytes", "device_bytes", "components_on_gpu",
                     "components_partly_on_gpu", "components", "leases"});
    for (const Json& component : model.at("components")) {
      CheckHas(component, {"name", "tensors", "payload_bytes", "cells", "cells_on_gpu", "device_bytes"});
    }
    for (const Json& lease : model.at("leases")) {
      CheckHas(lease, {"id", "pid", "uid", "client", "in_use", "claimed_mapped_bytes", "working_bytes", "age_seconds",
                       "state"});
    }
  }
}

// What all processes have allocated on the simulated card, counted from outside: each allocation is a file, of whole
// granules and a page that says what it is.
uint64_t AllocatedBytes(const DaemonRig& rig) {
  uint64_t allocated_bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(rig.runtime_dir() + "/sim")) {
    const uint64_t granule_bytes = uint64_t{2} << 20;
    if (entry.is_regular_file()) allocated_bytes += entry.file_size() / granule_bytes * granule_bytes;
  }
  return allocated_bytes;
}

// Every byte of the card is accounted for, once.
void CheckSum(const Json& device) {
  uint64_t sum_bytes = 0;
  for (const char* part : {"free_bytes", "broker_bytes", "pool_idle_bytes", "contexts_bytes", "others_bytes"}) {
    sum_bytes += device.value(part, uint64_t{0});
  }
  for (const Json& draining : device.at("draining")) sum_bytes += draining.at("bytes").get<uint64_t>();
  CHECK(sum_bytes == device.at("total_bytes"));
}

Json CheckedStatus(DaemonRig& rig) {
  Json status = rig.Status();
  CheckFields(status);
  REQUIRE(status.at("devices").size() >= 1);
  for (const Json& device : status.at("devices")) CheckSum(device);
  uint64_t model_bytes = 0;
  for (const Json& model : status.at("models")) model_bytes += model.at("device_bytes").get<uint64_t>();
  CHECK(model_bytes == status.at("devices")[0].at("broker_bytes"));
  if (OnSim()) {
    const Json& device = status.at("devices")[0];
    const uint64_t used_bytes = device.at("total_bytes").get<uint64_t>() - device.at("free_bytes").get<uint64_t>();
    CHECK(used_bytes == AllocatedBytes(rig));
  }
  return status;
}

TEST_CASE("The status has every field that is promised and accounts for every byte") {
  DaemonRig rig;
  Json status = CheckedStatus(rig);
  CHECK(status.at("daemon").at("driver") == (OnSim() ? "sim" : "cuda"));
  CHECK(status.at("daemon").at("serving") == true);
  CHECK(status.at("devices")[0].at("state") == "online");
  CHECK(status.at("models").empty());

  const Json registered = rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  status = CheckedStatus(rig);
  CHECK(status.at("host").at("pinned_bytes") == registered.at("pinned_bytes"));
  CHECK(status.at("models")[0].at("state") == "inactive");
  CHECK(status.at("models")[0].at("mode") == "held");

  const auto attached = rig.StartCtl({"attach", "flux", "--working_bytes", "3MiB"});
  rig.Await("the lease is live", [](const Json& now) {
    const Json& leases = now["models"][0]["leases"];
    return leases.size() == 1 && leases[0]["state"] == "live";
  });
  status = CheckedStatus(rig);
  const Json& model = status.at("models")[0];
  CheckHas(model.at("last_activation"), {"bytes", "seconds", "verified"});
  CHECK(model.at("state") == "active");
  CHECK(model.at("components").size() == 4);
  CHECK(model.at("components_on_gpu") == 4);
  CHECK(model.at("device_bytes") == model.at("claimed_device_bytes"));
  CHECK(status.at("devices")[0].at("broker_bytes") == model.at("device_bytes"));
  CHECK(status.at("devices")[0].at("working_bytes") == 3 << 20);
  CHECK(model.at("leases")[0].at("pid") == attached->pid());
  CHECK(model.at("leases")[0].at("in_use") == false);

  rig.Do({"deactivate", "flux"});
  status = CheckedStatus(rig);
  CHECK(status.at("devices")[0].at("pool_idle_bytes").get<uint64_t>() > 0);
  CHECK(rig.Do({"unload", "flux"}).at("host_bytes") == registered.at("pinned_bytes"));
  status = CheckedStatus(rig);
  CHECK(status.at("models").empty());
  CHECK(status.at("host").at("pinned_bytes") == 0);
}

TEST_CASE("The status as text fits a terminal of 80 columns") {
  DaemonRig rig;
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  rig.Do({"register", "llama", RealCheckpoint("llama-sharded")});
  ReaderClient first(rig, "flux");
  ReaderClient second(rig, "flux");
  const Outcome outcome = rig.Ctl({"status"});
  REQUIRE(outcome.exit_status == 0);
  for (const char* word : {"flux", "llama", "active", "inactive", "reader_client", "transformer"}) {
    CHECK(absl::StrContains(outcome.output, word));
  }
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(outcome.output, '\n'))) {
    INFO(line);
    CHECK(line.size() <= 80);
  }
}

TEST_CASE("A watched status shows a change without being asked again") {
  DaemonRig rig;
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  const auto watcher = rig.StartCtl({"status", "--watch", "--json"});
  const Json first = Json::parse(watcher->ReadLine());
  CheckFields(first);
  CHECK(first.at("models")[0].at("state") == "inactive");
  rig.Do({"activate", "flux"});
  while (Json::parse(watcher->ReadLine()).at("models")[0].at("state") != "active") {
  }
  rig.Do({"unload", "flux"});
  while (!Json::parse(watcher->ReadLine()).at("models").empty()) {
  }
}

TEST_CASE("Without a daemon, and with what is left of one, residencyctl says which and ends with 3") {
  DaemonRig rig;
  rig.daemon().Kill();
  const Json dead = rig.Refused({"status"}, 3);
  CHECK(dead.at("reason") == "CONNECTION_REFUSED");

  TestProcess nowhere({ProgramPath("residencyctl"), "--runtime_dir", rig.Path("nowhere"), "status"},
                      rig.Path("nowhere.err"));
  CHECK(nowhere.Wait() == 3);
  INFO(nowhere.Errors());
  CHECK(absl::StrContains(nowhere.Errors(), "NOT_FOUND/NO_SOCKET"));
}

TEST_CASE("A daemon that does not answer costs residencyctl its timeout and no more") {
  DaemonRig rig;
  rig.daemon().Signal(SIGSTOP);
  for (const char* command : {"status", "tensors"}) {
    const absl::Time start = absl::Now();
    const Json error = rig.Refused({command, "flux", "--timeout", "500ms"}, 4);
    CHECK(error.at("code") == "DEADLINE_EXCEEDED");
    CHECK(absl::Now() - start >= absl::Milliseconds(500));
    CHECK(absl::Now() - start < absl::Seconds(4));
  }
  rig.daemon().Signal(SIGCONT);
  CHECK(rig.Status().at("daemon").at("serving") == true);
}

TEST_CASE("What the daemon refuses ends with 1, what cannot be meant with 2") {
  DaemonRig rig;
  for (const char* command : {"activate", "attach", "deactivate", "unload", "verify", "tensors", "status"}) {
    INFO(command);
    const Json error = rig.Refused({command, "nobody"});
    CHECK(error.at("code") == "NOT_FOUND");
    CHECK(error.at("reason") == "NO_SUCH_MODEL");
  }
  CHECK(rig.Refused({"register", "gone", rig.Path("gone")}).at("reason") == "NO_SUCH_FILE");
  CHECK(rig.Refused({"register", "a name", RealCheckpoint("llama-lora")}).at("reason") == "BAD_NAME");

  rig.Do({"register", "llama", RealCheckpoint("llama-sharded")});
  CHECK(rig.Refused({"verify", "llama"}).at("reason") == "NOT_ACTIVE");
  const Json taken = rig.Refused({"register", "llama", RealCheckpoint("llama-lora")});
  CHECK(taken.at("code") == "ALREADY_EXISTS");
  CHECK(taken.at("reason") == "NAME_TAKEN");
  rig.Do({"activate", "llama"});
  CHECK(rig.Do({"register", "llama", RealCheckpoint("llama-sharded")}).at("done") == true);
  CHECK(rig.Do({"activate", "llama"}).at("bytes_moved") == 0);

  const std::vector<std::vector<std::string>> meaningless = {{},
                                                             {"activate"},
                                                             {"dance"},
                                                             {"status", "--timeout", "5parsecs"},
                                                             {"activate", "llama", "--device_budget", "1GB2"},
                                                             {"status", "--no_such_flag"}};
  for (const std::vector<std::string>& arguments : meaningless) {
    const Outcome outcome = rig.Ctl(arguments);
    INFO(outcome.errors);
    CHECK(outcome.exit_status == 2);
    CHECK_FALSE(outcome.errors.empty());
  }
}

}  // namespace
}  // namespace residency
