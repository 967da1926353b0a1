// SPDX-License-Identifier: Apache-2.0
//
// The host's memory: what is page-locked and what is not, what a registration may take, what becomes of it when the
// files change, and what is given back. Where page-locking fails or lasts is in end_to_end_pin.cc.
#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/daemon_rig.h"
#include "tests/memory_cgroup.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;

// A safetensors file of one tensor of zeros that takes no room on disk.
void WriteSparse(const std::string& path, uint64_t tensor_bytes) {
  std::string header =
      absl::StrCat(R"({"t":{"dtype":"U8","shape":[)", tensor_bytes, R"(],"data_offsets":[0,)", tensor_bytes, "]}}");
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::ofstream file(path, std::ios::binary);
  const uint64_t header_bytes = header.size();
  file.write(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  file << header;
  file.close();
  std::filesystem::resize_file(path, sizeof(header_bytes) + header_bytes + tensor_bytes);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// A line "key: number kB" of a file in /proc, in bytes.
uint64_t ProcBytes(const std::string& path, const std::string& key) {
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(ReadFile(path), '\n'))) {
    const std::vector<std::string> words = absl::StrSplit(line, absl::ByAnyChar(": \t"), absl::SkipEmpty());
    uint64_t kib = 0;
    if (words.size() >= 2 && words[0] == key && absl::SimpleAtoi(words[1], &kib)) return kib * 1024;
  }
  FAIL(path << " has no " << key);
  return 0;
}

uint64_t DaemonBytes(DaemonRig& rig, const std::string& key) {
  return ProcBytes(absl::StrCat("/proc/", rig.daemon().pid(), "/status"), key);
}

// A reader's hashes of what is on the device.
Json OnDevice(DaemonRig& rig, const std::string& model) {
  ReaderClient reader(rig, model);
  return reader.Ask("hash").at("sha256");
}

TEST_CASE("An explicit choice about page-locking wins over the daemon's, and the reply says which and why") {
  DaemonRig rig({"--pin", "no"});
  const Hashes truth = WriteCheckpoint(rig.Path("a.safetensors"), {9 * kMiB, 5}, 26);
  WriteCheckpoint(rig.Path("b.safetensors"), {kMiB}, 27);
  const Json by_daemon = rig.Do({"register", "a", rig.Path("a.safetensors")});
  CHECK(by_daemon.at("pinned_bytes") == 0);
  CHECK(by_daemon.at("pin").at("reason") == "requested");
  CHECK(OnDevice(rig, "a") == truth);
  const Json by_caller = rig.Do({"register", "b", rig.Path("b.safetensors"), "--pin", "yes"});
  CHECK(by_caller.at("pinned_bytes") == 2 * kMiB);
  CHECK(by_caller.at("pin").at("reason") == "requested");
  const Outcome text = rig.Ctl({"register", "c", rig.Path("b.safetensors"), "--pin", "no"});
  CHECK(text.exit_status == 0);
  CHECK(absl::StrContains(text.output, "pageable, as was asked for"));
  CHECK(rig.Ctl({"register", "d", rig.Path("b.safetensors"), "--pin", "perhaps"}).exit_status == 2);
  const Json host = rig.Status().at("host");
  CHECK(host.at("pinned_bytes") == 2 * kMiB);
  CHECK(host.at("pageable_bytes") == 12 * kMiB);
}

TEST_CASE("A model larger than the memory there is is refused before a byte is read, and no OOM killer acts") {
  DaemonRig rig;
  // In a cgroup of 2 GiB where this machine lets us make one, else within the whole machine's memory.
  const auto cgroup = MemoryCgroup::Make(2 * kGiB);
  if (cgroup != nullptr) {
    cgroup->Add(rig.daemon().pid());
  } else {
    std::cout << "no memory cgroup can be made here: only the limit of the whole machine is tested\n" << std::flush;
  }
  const uint64_t limit_bytes = cgroup != nullptr ? 2 * kGiB : ProcBytes("/proc/meminfo", "MemTotal");
  WriteSparse(rig.Path("huge.safetensors"), limit_bytes + kGiB);
  const uint64_t before_bytes = DaemonBytes(rig, "VmHWM");
  const Json error = rig.Refused({"register", "huge", rig.Path("huge.safetensors")});
  INFO(error.dump());
  CHECK(error.at("code") == "RESOURCE_EXHAUSTED");
  CHECK(error.at("reason") == "HOST_BUDGET");
  CHECK(error.at("needed_bytes").get<uint64_t>() >= limit_bytes + kGiB);
  const uint64_t available_bytes = error.at("available_bytes");
  CHECK(available_bytes <= limit_bytes - kGiB);
  CHECK(DaemonBytes(rig, "VmHWM") < before_bytes + 64 * kMiB);
  const Json status = rig.Status();
  CHECK(status.at("models").empty());
  CHECK(status.at("host").at("budget_bytes").get<uint64_t>() <= limit_bytes - kGiB);
  if (cgroup != nullptr) {
    CHECK(status.at("host").at("pin_limit_bytes") == kGiB);
    CHECK(status.at("host").at("pin_limit_source") == "cgroup");
    CHECK(cgroup->oom_kills() == 0);
  }

  // What fits is taken as before.
  WriteCheckpoint(rig.Path("small.safetensors"), {kMiB}, 28);
  CHECK(rig.Do({"register", "small", rig.Path("small.safetensors")}).at("done") == true);
}

TEST_CASE("The configured host budget is shown as the limit and holds for all models together") {
  DaemonRig rig({"--host_budget", "12MiB"});
  WriteCheckpoint(rig.Path("a.safetensors"), {8 * kMiB}, 29);
  WriteCheckpoint(rig.Path("b.safetensors"), {5 * kMiB}, 30);
  rig.Do({"register", "a", rig.Path("a.safetensors")});
  const Json error = rig.Refused({"register", "b", rig.Path("b.safetensors")});
  CHECK(error.at("reason") == "HOST_BUDGET");
  CHECK(error.at("needed_bytes") == 6 * kMiB);
  CHECK(error.at("available_bytes") == 4 * kMiB);
  const Json host = rig.Status().at("host");
  CHECK(host.at("budget_bytes") == 12 * kMiB);
  CHECK(host.at("pin_limit_bytes") == 12 * kMiB);
  CHECK(host.at("pin_limit_source") == "configured");
}

TEST_CASE("Registered bytes are immune to what happens to their file, which the daemon never maps") {
  DaemonRig rig;
  const std::string path = rig.Path("weights-of-flux.safetensors");
  const Hashes truth = WriteCheckpoint(path, {64 * kMiB, 123}, 31);
  const std::string maps = absl::StrCat("/proc/", rig.daemon().pid(), "/maps");
  const auto registering = rig.StartCtl({"register", "flux", path});
  size_t looks = 0;
  do {
    const bool mapped = absl::StrContains(ReadFile(maps), "weights-of-flux");
    REQUIRE_FALSE(mapped);
    ++looks;
  } while (!registering->EndsWithin(absl::Milliseconds(1)));
  REQUIRE(registering->Wait() == 0);
  CHECK(looks > 1);

  std::filesystem::resize_file(path, 1000);
  CHECK(OnDevice(rig, "flux") == truth);
  rig.Do({"deactivate", "flux"});
  std::ofstream(path, std::ios::in | std::ios::out).write("overwritten", 11);
  CHECK(OnDevice(rig, "flux") == truth);
  rig.Do({"deactivate", "flux"});
  std::filesystem::remove(path);
  CHECK(OnDevice(rig, "flux") == truth);
  CHECK_FALSE(absl::StrContains(ReadFile(maps), "weights-of-flux"));
}

TEST_CASE("Files that changed since they were registered are not taken for the same") {
  DaemonRig rig;
  const std::string path = rig.Path("a.safetensors");
  WriteCheckpoint(path, {kMiB}, 32);
  rig.Do({"register", "a", path});
  rig.Do({"register", "a", path});
  const auto check_noticed = [&](const std::string& what) {
    INFO(what);
    const Json error = rig.Refused({"register", "a", path});
    CHECK(error.at("code") == "ALREADY_EXISTS");
    CHECK(error.at("reason") == "NAME_TAKEN");
    CHECK(absl::StrContains(error.at("message").get<std::string>(), "changed"));
    rig.Do({"unload", "a"});
    rig.Do({"register", "a", path});
  };
  std::filesystem::last_write_time(path, std::filesystem::last_write_time(path) + std::chrono::seconds(1));
  check_noticed("its time");
  const auto written = std::filesystem::last_write_time(path);
  std::filesystem::copy_file(path, rig.Path("copy"));
  std::filesystem::rename(rig.Path("copy"), path);
  std::filesystem::last_write_time(path, written);
  check_noticed("another file of the same bytes and time in its place");
  WriteCheckpoint(path, {kMiB + 8}, 32);
  check_noticed("its size");
}

TEST_CASE("A model is in host memory once while it is registered and not at all afterwards") {
  DaemonRig rig;
  constexpr uint64_t kModelBytes = 512 * kMiB;
  WriteSparse(rig.Path("large.safetensors"), kModelBytes);
  // The first registration of all brings in code and tables that stay.
  WriteCheckpoint(rig.Path("first.safetensors"), {kMiB}, 33);
  rig.Do({"register", "first", rig.Path("first.safetensors")});
  const uint64_t before_bytes = DaemonBytes(rig, "VmRSS");
  const Json registered = rig.Do({"register", "large", rig.Path("large.safetensors")});
  const uint64_t set_bytes = registered.at("pinned_bytes");
  CHECK(set_bytes == kModelBytes);
  // A CUDA context has some hundred MiB of its own.
  CHECK(DaemonBytes(rig, "VmHWM") <= kModelBytes + 256 * kMiB + (OnSim() ? 0 : before_bytes));
  CHECK(DaemonBytes(rig, "VmRSS") >= kModelBytes);
  CHECK(rig.Do({"unload", "large"}).at("host_bytes") == kModelBytes);
  CHECK(DaemonBytes(rig, "VmRSS") <= before_bytes + 64 * kMiB);
}

TEST_CASE("On a host of several memory nodes a host copy lies near its GPU, and nothing is placed where there is one") {
  DaemonRig rig;
  WriteCheckpoint(rig.Path("a.safetensors"), {40 * kMiB}, 39);
  rig.Do({"register", "a", rig.Path("a.safetensors")});
  // What the kernel says: "ADDRESS POLICY file=/memfd:residency-... N0=PAGES ... kernelpagesize_kB=4".
  std::map<std::string, uint64_t> bytes;
  std::set<std::string> policies;
  const std::string maps = ReadFile(absl::StrCat("/proc/", rig.daemon().pid(), "/numa_maps"));
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(maps, '\n'))) {
    if (!absl::StrContains(line, "memfd:residency-")) continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    policies.insert(words[1]);
    uint64_t page_kib = 0;
    REQUIRE(absl::SimpleAtoi(words.back().substr(words.back().find('=') + 1), &page_kib));
    for (const std::string& word : words) {
      uint64_t pages = 0;
      const size_t equals = word.find('=');
      if (word[0] != 'N' || !absl::SimpleAtoi(word.substr(std::min(equals, word.size() - 1) + 1), &pages)) continue;
      bytes[word.substr(1, equals - 1)] += pages * page_kib * 1024;
    }
  }
  const Json device = rig.Device();
  const Json model = rig.Model("a");
  const std::string nodes = ReadFile("/sys/devices/system/node/has_memory");
  INFO(nodes << maps);
  if (!device.contains("numa_node")) {
    std::cout << "the driver's device is near no memory node of several here: nothing is to be placed\n" << std::flush;
    CHECK((policies.empty() || policies == std::set<std::string>{"default"}));
    if (nodes.find_first_of(",-") == std::string::npos) CHECK(model.at("host_nodes").empty());
    return;
  }
  const std::string near = absl::StrCat(device.at("numa_node").get<int>());
  CHECK(bytes[near] >= 40 * kMiB / 100 * 95);
  for (const Json& part : model.at("host_nodes")) {
    CHECK(part.at("bytes") == bytes[absl::StrCat(part.at("node").get<int>())]);
  }
  CHECK(model.at("host_nodes").size() == bytes.size());
}

TEST_CASE("Two names for the same file share one host copy, which lasts until the second is unloaded") {
  DaemonRig rig({"--host_budget", "50MiB"});
  const Hashes truth = WriteCheckpoint(rig.Path("a.safetensors"), {40 * kMiB, 99}, 34);
  std::filesystem::create_hard_link(rig.Path("a.safetensors"), rig.Path("b.safetensors"));
  const uint64_t set_bytes = rig.Do({"register", "a", rig.Path("a.safetensors")}).at("pinned_bytes");
  CHECK(set_bytes == 42 * kMiB);
  const uint64_t before_bytes = DaemonBytes(rig, "VmRSS");
  // A second copy would not fit the budget.
  const Json second = rig.Do({"register", "b", rig.Path("b.safetensors")});
  CHECK(second.at("pinned_bytes") == set_bytes);
  CHECK(second.at("pin").at("reason") == "shared");
  CHECK(DaemonBytes(rig, "VmRSS") < before_bytes + 20 * kMiB);
  CHECK(rig.Status().at("host").at("pinned_bytes") == set_bytes);
  CHECK(rig.Model("a").at("pinned_bytes") == set_bytes);
  CHECK(rig.Model("b").at("pinned_bytes") == set_bytes);

  rig.Do({"activate", "a"});
  CHECK(rig.Do({"unload", "a"}).at("host_bytes") == 0);
  CHECK(rig.Status().at("host").at("pinned_bytes") == set_bytes);
  CHECK(OnDevice(rig, "b") == truth);
  CHECK(rig.Do({"unload", "b"}).at("host_bytes") == set_bytes);
  const Json host = rig.Status().at("host");
  CHECK(host.at("pinned_bytes") == 0);
  CHECK(host.at("pageable_bytes") == 0);
  CHECK(rig.Do({"register", "c", rig.Path("b.safetensors")}).at("pin").at("reason") != "shared");
}

TEST_CASE("A dry run tells what would be pinned, what would fit and which flags help, and moves nothing") {
  DaemonRig rig({"--device_budget", "48MiB", "--host_budget", "100MiB"});
  WriteCheckpoint(rig.Path("a.safetensors"), {40 * kMiB}, 35);
  WriteCheckpoint(rig.Path("b.safetensors"), {20 * kMiB}, 36);
  const std::vector<std::string> components = {"--component", "big=" + rig.Path("a.safetensors"), "--component",
                                               "small=" + rig.Path("b.safetensors")};
  std::vector<std::string> dry = {"register", "two", "--dry_run"};
  dry.insert(dry.end(), components.begin(), components.end());
  const uint64_t rss_bytes = DaemonBytes(rig, "VmRSS");
  const Json run = rig.Do(dry);
  INFO(run.dump(2));
  CHECK(run.at("set_bytes") == 60 * kMiB);
  CHECK(run.at("host_fits") == true);
  CHECK(run.at("host_needed_bytes") == 60 * kMiB);
  CHECK(run.at("host_available_bytes") == 100 * kMiB);
  CHECK(run.at("pin").at("pinned") == true);
  CHECK(run.at("pin").at("reason") == "room");
  CHECK(run.at("device_uuid") == rig.Device().at("uuid"));
  CHECK(run.at("held") ==
        Json({{"fits", false}, {"needed_bytes", 60 * kMiB}, {"available_bytes", 48 * kMiB}, {"component", ""}}));
  CHECK(run.at("phased") ==
        Json({{"fits", true}, {"needed_bytes", 40 * kMiB}, {"available_bytes", 48 * kMiB}, {"component", "big"}}));
  CHECK_FALSE(run.contains("streamed"));
  CHECK(run.at("advised_flags") == Json::array({"--phased"}));
  CHECK(absl::StrContains(rig.Ctl(dry).output, "streamed not offered yet"));

  // Nothing of it is there.
  const Json status = rig.Status();
  CHECK(status.at("models").empty());
  CHECK(status.at("host").at("pinned_bytes") == 0);
  CHECK(status.at("devices")[0].at("broker_bytes") == 0);
  CHECK(DaemonBytes(rig, "VmRSS") < rss_bytes + 30 * kMiB);

  // A model that nobody uses would make room, so what it holds counts.
  rig.Do({"register", "one", rig.Path("a.safetensors")});
  rig.Do({"activate", "one"});
  const Json fits = rig.Do({"register", "other", rig.Path("b.safetensors"), "--dry_run"});
  CHECK(fits.at("held").at("fits") == true);
  CHECK(fits.at("held").at("available_bytes") == 48 * kMiB);
  CHECK(fits.at("advised_flags").empty());
  // The same files are there already, and the budget that is left would not do for them again.
  const Json shared = rig.Do({"register", "again", rig.Path("a.safetensors"), "--dry_run"});
  CHECK(shared.at("host_needed_bytes") == 0);
  CHECK(shared.at("pin").at("reason") == "shared");
  const Json taken = rig.Refused({"register", "one", rig.Path("b.safetensors"), "--dry_run"});
  CHECK(taken.at("reason") == "NAME_TAKEN");
  dry.push_back("--device_budget");
  dry.push_back("30MiB");
  const Json neither = rig.Do(dry);
  CHECK(neither.at("phased").at("fits") == false);
  CHECK(neither.at("phased").at("available_bytes") == 30 * kMiB);
  CHECK(neither.at("advised_flags").empty());
  CHECK(neither.at("host_needed_bytes") == 60 * kMiB);
  CHECK(neither.at("host_fits") == true);
}

}  // namespace
}  // namespace residency
