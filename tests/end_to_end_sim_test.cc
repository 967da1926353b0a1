// SPDX-License-Identifier: Apache-2.0
//
// The daemon as a process, where a test needs a card or a link that only the simulated driver has, or where the card
// does not matter.
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/grpc_status.h"
#include "mechanisms/refusal.h"
#include "tests/daemon_rig.h"
#include "tests/process_counts.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// ---- A caller that gives up. ----

// A model that takes 4 s over a link of 50 MB/s.
struct SlowModel {
  DaemonRig rig{{"--sim_link_bytes_per_second", "50000000"}};

  SlowModel() {
    WriteCheckpoint(rig.Path("slow.safetensors"), {191 * kMiB}, 81);
    rig.Do({"register", "slow", rig.Path("slow.safetensors")});
  }
  void AwaitState(const std::string& state, absl::Duration patience = kPatience) {
    rig.Await(
        "the model is " + state, [&](const Json& status) { return status["models"][0]["state"] == state; }, patience);
  }
  // The transfer has stopped, and what had moved is gone.
  void CheckStopped() {
    AwaitState("inactive", absl::Seconds(2));
    const Json status = rig.Status();
    CHECK(status.at("models")[0].at("device_bytes") == 0);
    CHECK(status.at("models")[0].at("claimed_device_bytes") == 0);
    CHECK_FALSE(status.at("models")[0].contains("last_error"));
    CHECK(status.at("devices")[0].at("broker_bytes") == 0);
    CHECK(status.at("daemon").at("oldest_transition_seconds") == 0);
  }
};

TEST_CASE(
    "An activation whose caller's deadline passes, or who is killed, stops moving bytes and takes them off again") {
  SlowModel slow;
  auto client = Client::Connect({slow.rig.runtime_dir(), "end_to_end_sim_test", kPatience});
  REQUIRE(client.ok());
  grpc::ClientContext context;
  v1::ActivateRequest request;
  request.set_model("slow");
  request.mutable_deadline()->set_nanos(500'000'000);
  v1::ActivateResponse response;
  const absl::Time start = absl::Now();
  const absl::Status status = FromGrpcStatus((*client)->service().Activate(&context, request, &response));
  const absl::Duration waited = absl::Now() - start;
  INFO(status.ToString());
  CHECK(status.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(waited >= absl::Milliseconds(300));
  CHECK(waited <= absl::Milliseconds(700));
  slow.CheckStopped();

  for (const char* command : {"activate", "attach"}) {
    const auto caller = slow.rig.StartCtl({command, "slow"});
    slow.AwaitState("activating");
    caller->Kill();
    slow.CheckStopped();
  }
}

TEST_CASE("A caller that leaves does not stop an activation that another one waits for") {
  SlowModel slow;
  const auto leaves = slow.rig.StartCtl({"activate", "slow"});
  slow.AwaitState("activating");
  const size_t before = SettledCountsOf(slow.rig.daemon().pid()).descriptors;
  const auto stays = slow.rig.StartCtl({"activate", "slow", "--json"});
  // Its request follows its connection at once. A status would be a connection too.
  const absl::Time deadline = absl::Now() + kPatience;
  while (CountsOf(slow.rig.daemon().pid()).descriptors <= before) REQUIRE(absl::Now() < deadline);
  for (int i = 0; i < 10; ++i) slow.rig.Status();
  CHECK(slow.rig.Model("slow").at("state") == "activating");
  leaves->Kill();
  const Json answer = Json::parse(stays->ReadAll());
  CHECK(stays->Wait() == 0);
  CHECK(answer.at("bytes_moved") == 0);  // the other one's transfer went on
  CHECK(slow.rig.Model("slow").at("state") == "active");
  CHECK(slow.rig.Do({"verify", "slow"}).at("absent_cells") == 0);
}

TEST_CASE(
    "A client maps cells while others are filled, uses none before all are, and gives them back if they never are") {
  DaemonRig rig{{"--sim_link_bytes_per_second", "100000000", "--cell_bytes", "2MiB"}};
  const Hashes truth = WriteCheckpoint(rig.Path("m.safetensors"), {127 * kMiB}, 82);
  rig.Do({"register", "m", rig.Path("m.safetensors")});
  ReaderClient reader(rig, "m");
  const Json before = reader.Ask("hash");
  CHECK(before.at("sha256") == truth);
  rig.Do({"deactivate", "m"});
  const auto maps_while_filled = [](const Json& status) {
    const Json& model = status["models"][0];
    const Json& lease = model["leases"][0];
    return model["state"] == "activating" && lease["state"] == "granting" && lease["claimed_mapped_bytes"] > 0;
  };
  const auto leaves = rig.StartCtl({"activate", "m"});
  rig.Await("the client maps what is there", maps_while_filled);
  reader.Send("hash");
  leaves->Kill();
  rig.Await("it has let that go", [](const Json& status) {
    const Json& lease = status["models"][0]["leases"][0];
    return status["models"][0]["state"] == "inactive" && lease["state"] == "revoked" &&
           lease["claimed_mapped_bytes"] == 0;
  });
  CHECK_FALSE(reader.process().HasLineWithin(absl::ZeroDuration()));
  const auto stays = rig.StartCtl({"activate", "m"});
  rig.Await("the client maps what is there", maps_while_filled);
  CHECK_FALSE(reader.process().HasLineWithin(absl::ZeroDuration()));
  const Json after = reader.Answer();
  CHECK(after.at("sha256") == truth);
  CHECK(after.at("addresses") == before.at("addresses"));
  CHECK(stays->Wait() == 0);
  CHECK(rig.Do({"verify", "m"}).at("refilled_cells") == 0);
}

TEST_CASE("SIGTERM ends a daemon within five seconds also while a long transfer is under way") {
  SlowModel slow;
  const auto caller = slow.rig.StartCtl({"activate", "slow"});
  slow.AwaitState("activating");
  const absl::Time start = absl::Now();
  slow.rig.daemon().Signal(SIGTERM);
  CHECK(slow.rig.daemon().Wait() == 0);
  CHECK(absl::Now() - start < absl::Seconds(3));
  CHECK(caller->Wait() == 1);
}

// ---- A model that can never fit. ----

// Name and size of every allocation on the simulated cards.
std::map<std::string, uint64_t> Allocations(const DaemonRig& rig) {
  std::map<std::string, uint64_t> files;
  for (const auto& entry : fs::recursive_directory_iterator(rig.runtime_dir() + "/sim")) {
    if (entry.is_regular_file()) files[entry.path()] = entry.file_size();
  }
  return files;
}

// The same figures, unscaled, are a test of the core alone.
TEST_CASE("A model that is larger than the card, at 1/64 of a real pair, is refused within 100 ms and without a byte") {
  // 16,611,000,000 and 16,890,000,000 bytes, over 64.
  const uint64_t card_bytes = 259'546'875;
  const uint64_t payload_bytes = 263'906'250;
  DaemonRig rig({"--sim_device_bytes", absl::StrCat(card_bytes)});
  {
    const std::string header =
        absl::StrCat(R"({"w":{"dtype":"U8","shape":[)", payload_bytes, R"(],"data_offsets":[0,)", payload_bytes, "]}}");
    std::ofstream file(rig.Path("big.safetensors"), std::ios::binary);
    for (int shift = 0; shift < 64; shift += 8) file.put(static_cast<char>(uint64_t{header.size()} >> shift));
    file << header;
    file.close();
    // The weights are a hole: zeros.
    fs::resize_file(rig.Path("big.safetensors"), 8 + header.size() + payload_bytes);
  }
  rig.Do({"register", "big", rig.Path("big.safetensors")});
  const auto allocations = Allocations(rig);
  const uint64_t free_bytes = rig.Device().at("free_bytes");

  auto client = Client::Connect({rig.runtime_dir(), "end_to_end_sim_test", kPatience});
  REQUIRE(client.ok());
  absl::Duration fastest = absl::InfiniteDuration();
  for (int i = 0; i < 5; ++i) {
    grpc::ClientContext context;
    v1::ActivateRequest request;
    request.set_model("big");
    v1::ActivateResponse response;
    const absl::Time start = absl::Now();
    const absl::Status status = FromGrpcStatus((*client)->service().Activate(&context, request, &response));
    fastest = std::min(fastest, absl::Now() - start);
    INFO(status.ToString());
    CHECK(status.code() == absl::StatusCode::kResourceExhausted);
    const auto refusal = GetRefusal(status);
    REQUIRE(refusal.has_value());
    CHECK(refusal->reason == "GPU_BUDGET");
    CHECK(refusal->needed_bytes == 126 * 2 * kMiB);
    CHECK(refusal->available_bytes == free_bytes);
  }
  CHECK(fastest < absl::Milliseconds(100));
  for (const auto& [file, bytes] : Allocations(rig)) {
    INFO(file << " of " << bytes << " bytes");
    CHECK(allocations.contains(file));
  }
  CHECK(rig.Device().at("free_bytes") == free_bytes);
  CHECK(rig.Model("big").at("state") == "inactive");
  CHECK(rig.Model("big").at("generation") == 0);
}

// ---- A program beside the daemon that needs room. ----

TEST_CASE("Room that only idle cells take is another program's after a trim, or by itself after --pool_idle") {
  // Doctor's measurement stands for the program: it needs 48 MiB, and says which error it meets without.
  const std::vector<std::string> need = {"doctor", "--measure", "--driver", "sim", "--bytes", "16MiB"};
  const auto fill_pool = [](DaemonRig& rig) {
    WriteSparseCheckpoint(rig.Path("one.safetensors"), {92 * kMiB}, 96);
    rig.Do({"register", "one", rig.Path("one.safetensors")});
    rig.Do({"activate", "one"});
    rig.Do({"deactivate", "one"});
  };
  {
    DaemonRig rig({"--sim_device_bytes", "128MiB", "--pool_idle", "1h"});
    fill_pool(rig);
    const Json refused = rig.Refused(need);
    CHECK(refused.at("reason") == "GPU_MEMORY");
    CHECK(refused.at("available_bytes") < refused.at("needed_bytes"));
    CHECK(rig.Do({"trim"}).at("devices")[0].at("freed_bytes") == 92 * kMiB);
    CHECK(rig.Do(need).at("measured_bytes") == 16 * kMiB);
  }
  {
    DaemonRig rig({"--sim_device_bytes", "128MiB", "--pool_idle", "100ms"});
    fill_pool(rig);
    rig.Await("the pool is empty", [](const Json& status) { return status["devices"][0]["pool_idle_bytes"] == 0; });
    CHECK(rig.Do(need).at("measured_bytes") == 16 * kMiB);
  }
}

// ---- Sockets, descriptors, processes. ----

TEST_CASE("A runtime directory that leaves no room for a socket's name is refused with that reason") {
  ScratchDirectory scratch;
  const std::string longest = scratch.path() + "/" + std::string(107 - 11 - scratch.path().size() - 1, 'd');
  TestProcess refused({ProgramPath("residencyd"), "--driver=sim", "--runtime_dir", longest + "d"},
                      scratch.path() + "/errors");
  CHECK(refused.Wait() == 1);
  INFO(refused.Errors());
  CHECK(absl::StrContains(refused.Errors(), "INVALID_ARGUMENT/PATH_TOO_LONG"));
  CHECK(absl::StrContains(refused.Errors(), "107 bytes"));
  CHECK_FALSE(fs::exists(longest + "d"));
}

TEST_CASE("The daemon makes no process, not in start nor in 100 calls, and hands no descriptor on") {
  DaemonRig rig({}, {ProgramPath("without_fork")});
  // The filter is in place: 2 is that of a filter.
  std::ifstream status("/proc/" + std::to_string(rig.daemon().pid()) + "/status");
  std::string seccomp;
  for (std::string line; std::getline(status, line);) {
    if (absl::StartsWith(line, "Seccomp:")) seccomp = line;
  }
  CHECK(absl::EndsWith(seccomp, "2"));

  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  ReaderClient reader(rig, "flux");
  auto client = Client::Connect({rig.runtime_dir(), "end_to_end_sim_test", kPatience});
  REQUIRE(client.ok());
  for (int i = 0; i < 100; ++i) {
    grpc::ClientContext context;
    v1::GetStatusResponse response;
    REQUIRE((*client)->service().GetStatus(&context, v1::GetStatusRequest(), &response).ok());
  }
  CHECK(reader.Ask("hash").at("sha256") == TrueHashes("flux-like"));
  rig.Do({"verify", "flux"});
  // What it was handed itself: standard input, output and errors, and whatever this process passes on.
  const std::vector<std::string> handed = DescriptorsKeptOnExec(getpid());
  for (const std::string& kept : DescriptorsKeptOnExec(rig.daemon().pid())) {
    INFO(kept);
    const bool standard = absl::StartsWith(kept, "0 ") || absl::StartsWith(kept, "1 ") || absl::StartsWith(kept, "2 ");
    CHECK((standard || std::find(handed.begin(), handed.end(), kept) != handed.end()));
  }
  rig.Do({"unload", "flux"});
  CHECK_FALSE(rig.daemon().EndsWithin(absl::ZeroDuration()));

  // The same filter does stop a program that makes one.
  TestProcess forks({ProgramPath("without_fork"), "/bin/sh", "-c", "/bin/true; /bin/true"}, rig.Path("forks"));
  CHECK(forks.Wait() == -SIGSYS);
}

}  // namespace
}  // namespace residency
