// SPDX-License-Identifier: Apache-2.0
#include "tests/daemon_rig.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMiB = uint64_t{1} << 20;
// A simulated card, and what it is made of, must fit into memory beside the rest.
constexpr char kSimDeviceBytes[] = "1GiB";
// What a real card's driver keeps for itself comes and goes in pieces of 2 MiB.
constexpr uint64_t kRealToleranceBytes = 16 * kMiB;
constexpr uint64_t kRoomForTestBytes = 2048 * kMiB;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

bool OnSim() {
  const std::string name = Environment("RESIDENCY_TEST_DRIVER");
  if (name.empty() || name == "sim") return true;
  if (name == "cuda") return false;
  throw std::runtime_error("RESIDENCY_TEST_DRIVER is sim or cuda");
}

std::string ProgramPath(const std::string& name) {
  std::vector<std::string> candidates;
  if (const std::string bin = Environment("RESIDENCY_BIN_DIR"); !bin.empty()) {
    candidates.push_back(absl::StrCat(bin, "/", name));
  }
  const std::string self = fs::read_symlink("/proc/self/exe").parent_path().parent_path();
  for (const std::string& top : {fs::current_path().string(), self}) {
    for (const char* folder : {"/daemon/", "/client/ctl/", "/tests/", "/bin/"}) {
      candidates.push_back(absl::StrCat(top, folder, name));
    }
  }
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  throw std::runtime_error(absl::StrCat("no program ", name, " here; RESIDENCY_BIN_DIR can name its folder"));
}

Json Outcome::Document() const {
  INFO("standard output: " << output << "standard error: " << errors);
  REQUIRE(Json::accept(output));
  return Json::parse(output);
}

// Short, as a socket's path has at most 107 bytes, and in memory where there is enough, as simulated cards are files.
ScratchDirectory::ScratchDirectory() {
  std::error_code error;
  const fs::space_info shm = fs::space("/dev/shm", error);
  const bool roomy = !error && shm.available > kRoomForTestBytes && access("/dev/shm", W_OK) == 0;
  path_ = roomy ? "/dev/shm/residency-XXXXXX" : "/tmp/residency-XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no directory to work in");
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

DaemonRig::DaemonRig(std::vector<std::string> flags, std::vector<std::string> launcher)
    : flags_(std::move(flags)), launcher_(std::move(launcher)), runtime_dir_(Path("run")) {
  Start();
}

DaemonRig::~DaemonRig() {
  if (daemon_ != nullptr && std::uncaught_exceptions() > 0) {
    std::cerr << "what residencyd wrote:\n" << daemon_->Errors() << std::flush;
  } else if (daemon_ != nullptr && !daemon_->EndsWithin(absl::ZeroDuration())) {
    daemon_->Signal(SIGTERM);
    CHECK(daemon_->Wait(absl::Seconds(5)) == 0);
  }
}

std::vector<std::string> DaemonRig::DaemonCommand() const {
  std::vector<std::string> command = launcher_;
  command.insert(command.end(), {ProgramPath("residencyd"), "--runtime_dir", runtime_dir_});
  if (OnSim()) {
    command.insert(command.end(), {"--driver=sim", "--device_reserve=0"});
    if (std::find(flags_.begin(), flags_.end(), "--sim_device_bytes") == flags_.end()) {
      command.insert(command.end(), {"--sim_device_bytes", kSimDeviceBytes});
    }
  } else {
    command.push_back("--driver=cuda");
  }
  command.insert(command.end(), flags_.begin(), flags_.end());
  return command;
}

std::string DaemonRig::NewErrorPath() { return Path(absl::StrCat("errors-", ++processes_)); }

void DaemonRig::Start() {
  daemon_ = std::make_unique<TestProcess>(DaemonCommand(), NewErrorPath());
  const absl::Time deadline = absl::Now() + kPatience;
  while (!absl::StrContains(daemon_->Errors(), "serving on ")) {
    const bool ended = daemon_->EndsWithin(absl::Milliseconds(5));
    INFO("residencyd does not serve: " << daemon_->Errors());
    REQUIRE_FALSE(ended);
    REQUIRE(absl::Now() < deadline);
  }
}

std::unique_ptr<TestProcess> DaemonRig::StartCtl(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {ProgramPath("residencyctl"), "--runtime_dir", runtime_dir_};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return std::make_unique<TestProcess>(command, NewErrorPath());
}

std::unique_ptr<TestProcess> DaemonRig::StartProgram(const std::string& name,
                                                     const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {ProgramPath(name), runtime_dir_};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return std::make_unique<TestProcess>(command, NewErrorPath());
}

Outcome DaemonRig::Ctl(const std::vector<std::string>& arguments) {
  const absl::Time start = absl::Now();
  const auto process = StartCtl(arguments);
  process->EndInput();
  Outcome outcome;
  outcome.output = process->ReadAll();
  outcome.exit_status = process->Wait();
  outcome.errors = process->Errors();
  outcome.duration = absl::Now() - start;
  return outcome;
}

Json DaemonRig::Do(std::vector<std::string> arguments) {
  arguments.push_back("--json");
  const Outcome outcome = Ctl(arguments);
  INFO("residencyctl " << arguments.front() << ": " << outcome.errors);
  REQUIRE(outcome.exit_status == 0);
  return outcome.Document();
}

Json DaemonRig::Refused(std::vector<std::string> arguments, int exit_status) {
  arguments.push_back("--json");
  const Outcome outcome = Ctl(arguments);
  INFO("residencyctl " << arguments.front() << ": " << outcome.output << outcome.errors);
  REQUIRE(outcome.exit_status == exit_status);
  const Json error = outcome.Document().at("error");
  // The one line for people says the same.
  const std::string line =
      absl::StrCat("residencyctl: ", error.at("code").get<std::string>(), "/", error.at("reason").get<std::string>(),
                   ": ", error.at("message").get<std::string>(), "\n");
  REQUIRE(outcome.errors == line);
  return error;
}

void DaemonRig::Await(const std::string& what, const std::function<bool(const Json&)>& holds, absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (true) {
    const bool last = absl::Now() > deadline;
    const Json status = Status();
    if (holds(status)) return;
    if (last) FAIL("waited in vain until " << what << "; the status is now " << status.dump(2));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void DaemonRig::AwaitFree(uint64_t free_bytes) {
  const uint64_t tolerance_bytes = OnSim() ? 0 : kRealToleranceBytes;
  Await(absl::StrCat(free_bytes, " bytes are free"), [=](const Json& status) {
    return status["devices"][0]["free_bytes"].get<uint64_t>() + tolerance_bytes >= free_bytes;
  });
}

ReaderClient::ReaderClient(DaemonRig& rig, const std::string& model)
    : process_(rig.StartProgram("reader_client", {model})) {
  const Json attached = Answer();
  INFO(attached.dump());
  REQUIRE(attached.contains("lease_id"));
}

Json ReaderClient::Ask(const std::string& command) {
  Send(command);
  return Answer();
}

Json ReaderClient::AskUntilRefused(const std::string& command) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (true) {
    Json answer = Ask(command);
    if (answer.contains("error") || absl::Now() > deadline) return answer;
  }
}

}  // namespace residency
