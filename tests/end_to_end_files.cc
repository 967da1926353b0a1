// SPDX-License-Identifier: Apache-2.0
//
// The host tier `file`: the same bytes as from a mirror, and what is said when the files change under the daemon.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/daemon_rig.h"
#include "tests/read_back.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST_CASE("Every tensor of every checkpoint is the same from its files as from a mirror, and as its writer knows it") {
  DaemonRig rig;
  for (const std::string& folder : kRealCheckpoints) {
    INFO(folder);
    const Hashes truth = TrueHashes(folder);
    rig.Do({"register", folder + "-m", RealCheckpoint(folder)});
    const Json registered = rig.Do({"register", folder + "-f", RealCheckpoint(folder), "--host_tier", "file"});
    CHECK(registered.at("host_tier") == "file");
    CHECK(registered.at("pin").at("pinned") == true);
    CHECK(registered.at("pin").at("reason") == "host_tier");
    CHECK(registered.at("pinned_bytes").get<uint64_t>() >= registered.at("payload_bytes").get<uint64_t>());
    CHECK(ReadBack(rig, folder + "-m") == truth);
    CHECK(ReadBack(rig, folder + "-f") == truth);
    CHECK(rig.Do({"verify", folder + "-f"}).at("refilled_cells") == 0);
  }
}

TEST_CASE("The first activation from files is trusted and said to be, later ones are verified against it") {
  DaemonRig rig;
  const Hashes truth = WriteCheckpoint(rig.Path("a.safetensors"), {5 * kMiB + 3, 77, 2 * kMiB}, 51);
  const Json dry = rig.Do({"register", "a", rig.Path("a.safetensors"), "--host_tier", "file", "--dry_run"});
  const Json one = rig.Do({"register", "a", rig.Path("a.safetensors"), "--host_tier", "file"});
  CHECK(dry.at("host_needed_bytes") == one.at("pinned_bytes"));
  // Another name for the same files has the same pages locked; a mirror of them is another copy.
  rig.Do({"register", "b", rig.Path("a.safetensors"), "--host_tier", "file"});
  const uint64_t page_cache_bytes = one.at("pinned_bytes");
  Json host = rig.Status().at("host");
  CHECK(host.at("page_cache_bytes") == page_cache_bytes);
  CHECK(host.at("pinned_bytes") == page_cache_bytes);
  rig.Do({"register", "c", rig.Path("a.safetensors"), "--pin", "yes"});
  host = rig.Status().at("host");
  CHECK(host.at("page_cache_bytes") == page_cache_bytes);
  CHECK(host.at("pinned_bytes") == page_cache_bytes + 8 * kMiB);

  const Json first = rig.Do({"activate", "a"});
  CHECK(first.at("verified_against") == "first_activation");
  CHECK(first.at("trusted_cells") == 1);
  CHECK(first.at("verified_cells") == 0);
  CHECK(first.at("bytes_moved") == one.at("payload_bytes"));
  const Json model = rig.Model("a");
  CHECK(model.at("host_tier") == "file");
  CHECK(model.at("verified_against") == "first_activation");
  CHECK(model.at("last_activation").at("trusted") == 1);
  CHECK(absl::StrContains(rig.Ctl({"status", "a"}).output, "host tier file: verified against the first activation"));
  CHECK(rig.Model("c").at("verified_against") == "registration");
  rig.Do({"deactivate", "a"});
  const Json again = rig.Do({"activate", "b"});
  CHECK(again.at("trusted_cells") == 0);
  CHECK(again.at("verified_cells") == 1);
  CHECK(ReadBack(rig, "b") == truth);
  CHECK(rig.Do({"unload", "a"}).at("host_bytes") == 0);
  CHECK(rig.Do({"unload", "b"}).at("host_bytes") == page_cache_bytes);
  CHECK(rig.Status().at("host").at("page_cache_bytes") == 0);
}

TEST_CASE("A file that changes under its registration refuses the next activation, and is taken anew after an unload") {
  DaemonRig rig({"--host_tier", "file"});
  const std::string path = rig.Path("a.safetensors");
  const auto change_and_check = [&](const std::string& what, const std::string& reason) {
    INFO(what);
    const Json error = rig.Refused({"activate", "a"});
    CHECK(error.at("reason") == reason);
    CHECK(error.at("file") == path);
    CHECK(rig.Model("a").at("state") == "inactive");
    CHECK(rig.Model("a").at("device_bytes") == 0);
    CHECK(rig.Model("a").at("last_error").at("reason") == reason);
    rig.Do({"unload", "a"});
  };
  WriteCheckpoint(path, {3 * kMiB}, 52);
  CHECK(rig.Do({"register", "a", path}).at("host_tier") == "file");
  rig.Do({"activate", "a"});
  rig.Do({"deactivate", "a"});
  fs::resize_file(path, kMiB);
  change_and_check("cut", "FILE_CHANGED");

  WriteCheckpoint(path, {3 * kMiB}, 53);
  rig.Do({"register", "a", path});
  const Hashes rewritten = WriteCheckpoint(path, {3 * kMiB}, 54);
  change_and_check("rewritten", "FILE_CHANGED");

  rig.Do({"register", "a", path});
  CHECK(ReadBack(rig, "a") == rewritten);
  // What is on the device stays right while the file is replaced.
  WriteCheckpoint(rig.Path("new"), {3 * kMiB}, 55);
  fs::rename(rig.Path("new"), path);
  CHECK(ReadBack(rig, "a") == rewritten);
  rig.Do({"deactivate", "a"});
  change_and_check("replaced", "FILE_CHANGED");

  rig.Do({"register", "a", path});
  fs::remove(path);
  change_and_check("removed", "FILE_MISSING");
}

TEST_CASE(
    "A daemon that page-locks no copies takes models of the host tier file, unless their caller forbids locking") {
  for (const bool by_default : {false, true}) {
    INFO("the tier is the choice of the " << (by_default ? "daemon" : "caller"));
    DaemonRig rig(by_default ? std::vector<std::string>{"--pin", "no", "--host_tier", "file"}
                             : std::vector<std::string>{"--pin", "no"});
    const std::string path = rig.Path("a.safetensors");
    WriteCheckpoint(path, {kMiB}, 57);
    std::vector<std::string> file = {"register", "a", path};
    if (!by_default) file.insert(file.end(), {"--host_tier", "file"});
    std::vector<std::string> never = file;
    never.insert(never.end(), {"--pin", "no"});
    CHECK(rig.Refused(never).at("reason") == "BAD_PIN");
    CHECK(rig.Do(file).at("pin").at("reason") == "host_tier");
    CHECK(rig.Do({"register", "b", path, "--host_tier", "mirror"}).at("pin").at("pinned") == false);
    CHECK(absl::StrContains(rig.daemon().Errors(), "--pin no is for the host tier mirror") == by_default);
  }
}

TEST_CASE("What the host tier file cannot do is refused, each with its reason") {
  DaemonRig rig;
  const std::string path = rig.Path("a.safetensors");
  WriteCheckpoint(path, {kMiB}, 56);
  const auto refused = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"register", "a", path, "--host_tier", "file"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return rig.Refused(arguments).at("reason");
  };
  CHECK(refused({"--phased"}) == "BAD_HOST_TIER");
  CHECK(refused({"--phased", "--dry_run"}) == "BAD_HOST_TIER");
  CHECK(refused({"--pin", "no"}) == "BAD_PIN");
  const Outcome none = rig.Ctl({"register", "a", path, "--host_tier", "none"});
  CHECK(none.exit_status == 2);
  CHECK(absl::StrContains(none.errors, "none is not offered yet"));
  rig.Do({"register", "a", path});
  const Json taken = rig.Refused({"register", "a", path, "--host_tier", "file"});
  CHECK(taken.at("reason") == "NAME_TAKEN");
  CHECK(absl::StrContains(taken.at("message").get<std::string>(), "host tier mirror, not file"));
}

}  // namespace
}  // namespace residency
