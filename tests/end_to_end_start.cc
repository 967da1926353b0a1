// SPDX-License-Identifier: Apache-2.0
//
// How the daemon starts and ends in the eyes of others: who may open its sockets, and what it tells a service manager.
#include <grp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/unique_fd.h"
#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

// ---- Who may open what it makes. ----

// A group that nobody is in, and a user that is not root. Neither needs an entry anywhere.
constexpr gid_t kGroup = 54321;
constexpr uid_t kUser = 54322;

// The group that a daemon of this test can take: only root has the choice.
gid_t ChosenGroup() { return geteuid() == 0 ? kGroup : getegid(); }

struct Access {
  mode_t mode = 0;
  gid_t group = 0;
};
// Mode 0 where there is nothing.
Access AccessOf(const std::string& path) {
  struct stat status {};
  if (lstat(path.c_str(), &status) != 0) return {};
  return {status.st_mode & 07777, status.st_gid};
}

// Starts a daemon on `runtime_dir` and waits until it serves.
std::unique_ptr<TestProcess> Serving(const std::string& runtime_dir, const std::vector<std::string>& flags,
                                     const std::string& error_path) {
  std::vector<std::string> command = {ProgramPath("residencyd"), "--driver=sim", "--runtime_dir", runtime_dir};
  command.insert(command.end(), flags.begin(), flags.end());
  auto daemon = std::make_unique<TestProcess>(command, error_path);
  const absl::Time deadline = absl::Now() + kPatience;
  while (!absl::StrContains(daemon->Errors(), "serving on ")) {
    const bool ended = daemon->EndsWithin(absl::Milliseconds(2));
    INFO(daemon->Errors());
    REQUIRE_FALSE(ended);
    REQUIRE(absl::Now() < deadline);
  }
  return daemon;
}

TEST_CASE(
    "Whatever the umask, sockets are 0660 and of the asked group from the first moment, in folders that only their "
    "owner writes") {
  const mode_t old = umask(0);
  ScratchDirectory scratch;
  const std::string runtime_dir = scratch.path() + "/made/by/it";
  const gid_t group = ChosenGroup();
  std::atomic<bool> done{false};
  std::atomic<int> looks{0};
  std::atomic<int> too_wide{0};
  std::atomic<int> of_others{0};
  std::thread observer([&] {
    while (!done) {
      for (const char* name : {"/grpc.sock", "/pages.sock", "/sim"}) {
        const Access access = AccessOf(runtime_dir + name);
        looks += access.mode != 0;
        too_wide += (access.mode & ~mode_t{absl::StrContains(name, "sock") ? 0660u : 0770u}) != 0;
        of_others += access.mode != 0 && access.group != group;
      }
    }
  });
  // That no bind of a socket shows more, over 2,000 of them, is page_channel_test's.
  for (int i = 0; i < 5; ++i) {
    const auto daemon =
        Serving(runtime_dir, {"--socket_group", absl::StrCat(group)}, scratch.path() + "/errors" + std::to_string(i));
    for (const char* name : {"/grpc.sock", "/pages.sock"}) {
      CHECK(AccessOf(runtime_dir + name).mode == 0660);
      CHECK(AccessOf(runtime_dir + name).group == group);
    }
    daemon->Signal(SIGTERM);
    CHECK(daemon->Wait() == 0);
  }
  done = true;
  observer.join();
  umask(old);
  CHECK(looks > 0);
  CHECK(too_wide == 0);
  CHECK(of_others == 0);
  for (const char* made : {"/made", "/made/by", "/made/by/it"}) {
    CHECK(AccessOf(scratch.path() + made).mode == 0755);
    CHECK(AccessOf(scratch.path() + made).group == group);
  }
  CHECK((AccessOf(runtime_dir + "/lock").mode & 0022) == 0);
  for (const auto& entry : fs::recursive_directory_iterator(runtime_dir + "/sim")) {
    INFO(entry.path().string());
    CHECK((AccessOf(entry.path()).mode & 0007) == 0);
    CHECK(AccessOf(entry.path()).group == group);
  }
}

TEST_CASE("Sockets whose group was not chosen have that of the process, and residency as root where it exists") {
  ScratchDirectory scratch;
  const auto daemon = Serving(scratch.path() + "/run", {}, scratch.path() + "/errors");
  const group* residency = geteuid() == 0 ? getgrnam("residency") : nullptr;
  const gid_t expected = residency != nullptr ? residency->gr_gid : getegid();
  CHECK(AccessOf(scratch.path() + "/run/grpc.sock").group == expected);
  CHECK(AccessOf(scratch.path() + "/run/pages.sock").group == expected);
}

TEST_CASE("A group is found by its name, and one that is unknown, or no group, is refused by its name") {
  ScratchDirectory scratch;
  // Its own, by name where it has one.
  const group* own = getgrgid(getegid());
  const std::string name = own != nullptr ? own->gr_name : absl::StrCat(getegid());
  {
    const auto daemon = Serving(scratch.path() + "/run", {"--socket_group", name}, scratch.path() + "/errors");
    CHECK(AccessOf(scratch.path() + "/run/grpc.sock").group == getegid());
  }
  // The last would mean no change to the kernel, the one before is too large to be a group.
  for (const char* unknown : {"no-such-group", "", "-5", "12three", "4294967296", "4294967295"}) {
    TestProcess refused({ProgramPath("residencyd"), "--driver=sim", "--runtime_dir", scratch.path() + "/refused",
                         absl::StrCat("--socket_group=", unknown)},
                        scratch.path() + "/refused-errors-" + unknown);
    CHECK(refused.Wait() == 2);
    INFO(unknown << ": " << refused.Errors());
    CHECK(absl::StrContains(refused.Errors(), "--socket_group"));
    CHECK(absl::StrContains(refused.Errors(), unknown));
    CHECK_FALSE(fs::exists(scratch.path() + "/refused"));
  }
}

TEST_CASE("A user of the sockets' group can use the daemon and its simulated cards, and another one gets EACCES") {
  DaemonRig rig({"--socket_group", absl::StrCat(ChosenGroup())});
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  // Where others may run them.
  REQUIRE(chmod(rig.Path("").c_str(), 0755) == 0);
  for (const char* program : {"residencyctl", "reader_client"}) {
    fs::copy_file(ProgramPath(program), rig.Path(program));
    REQUIRE(chmod(rig.Path(program).c_str(), 0755) == 0);
  }
  const bool root = geteuid() == 0;
  if (!root) std::cout << "not root: the sockets are tried as this user only\n" << std::flush;
  const auto as = [&](gid_t group, const std::string& program, const std::vector<std::string>& arguments) {
    std::vector<std::string> command;
    if (root) {
      command = {"/usr/bin/setpriv", absl::StrCat("--reuid=", kUser), absl::StrCat("--regid=", group),
                 "--clear-groups"};
    }
    command.push_back(rig.Path(program));
    command.insert(command.end(), arguments.begin(), arguments.end());
    return std::make_unique<TestProcess>(command, rig.Path(absl::StrCat("errors-", group, "-", program)));
  };
  const auto member = as(ChosenGroup(), "reader_client", {rig.runtime_dir(), "flux"});
  INFO(member->Errors());
  REQUIRE(Json::parse(member->ReadLine()).contains("lease_id"));
  member->WriteLine("hash");
  CHECK(Json::parse(member->ReadLine()).at("sha256") == TrueHashes("flux-like"));
  CHECK(rig.Model("flux").at("leases")[0].at("pid") == member->pid());
  if (!root) return;

  // gRPC's socket, then the page channel's, which a client opens first.
  const auto asks = as(kGroup + 1, "residencyctl", {"--runtime_dir", rig.runtime_dir(), "status"});
  CHECK(asks->Wait() == 3);
  INFO(asks->Errors());
  CHECK(absl::StrContains(asks->Errors(), "PERMISSION_DENIED/SOCKET_PERMISSION"));
  CHECK(absl::StrContains(asks->Errors(), "grpc.sock"));
  for (const char* name : {"/grpc.sock", "/pages.sock"}) {
    // 13 is EACCES.
    const std::string script =
        absl::StrCat("import socket,sys\ns=socket.socket(socket.AF_UNIX,socket.",
                     absl::StrContains(name, "grpc") ? "SOCK_STREAM" : "SOCK_SEQPACKET",
                     ")\ntry:\n  s.connect(sys.argv[1])\nexcept OSError as e:\n  sys.exit(e.errno)\n");
    for (const auto& [group, expected] : {std::pair<gid_t, int>{kGroup + 1, 13}, {kGroup, 0}}) {
      TestProcess connects({"/usr/bin/setpriv", absl::StrCat("--reuid=", kUser), absl::StrCat("--regid=", group),
                            "--clear-groups", "/usr/bin/python3", "-c", script, rig.runtime_dir() + name},
                           rig.Path("connects"));
      INFO(name << " as group " << group);
      CHECK(connects.Wait() == expected);
    }
  }
}

// ---- The service manager. ----

// What a daemon sends to $NOTIFY_SOCKET.
class NotifySocket {
 public:
  explicit NotifySocket(const std::string& path) : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    REQUIRE(path.size() < sizeof(address.sun_path));
    std::memcpy(address.sun_path, path.data(), path.size());
    REQUIRE(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    const int on = 1;
    REQUIRE(setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) == 0);
  }

  struct Message {
    std::string text;  // empty where none came in time
    pid_t pid = 0;     // of the sender, as the kernel says
  };
  Message Next(absl::Duration patience = kPatience) {
    pollfd poller{socket_.get(), POLLIN, 0};
    if (poll(&poller, 1, static_cast<int>(absl::ToInt64Milliseconds(patience))) != 1) return {};
    char text[256];
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))] = {};
    iovec part{text, sizeof(text)};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t bytes = recvmsg(socket_.get(), &message, MSG_DONTWAIT);
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (bytes < 0 || header == nullptr) return {};
    ucred sender{};
    std::memcpy(&sender, CMSG_DATA(header), sizeof(sender));
    return {std::string(text, bytes), sender.pid};
  }

 private:
  UniqueFd socket_;
};

TEST_CASE(
    "The service manager hears READY=1 once calls are answered, STOPPING=1 at the end, from the started process") {
  ScratchDirectory scratch;
  const std::string runtime_dir = scratch.path() + "/run";
  NotifySocket manager(scratch.path() + "/notify");
  // A driver that takes its time.
  TestProcess daemon(
      {"/usr/bin/env", absl::StrCat("NOTIFY_SOCKET=", scratch.path(), "/notify"), ProgramPath("residencyd"),
       "--driver=sim", "--runtime_dir", runtime_dir, "--sim_faults=cuInit=+300ms"},
      scratch.path() + "/errors");
  const NotifySocket::Message ready = manager.Next();
  // At once; neither waits for a socket to appear.
  CHECK(ConnectUnix(runtime_dir + "/grpc.sock", SOCK_STREAM, absl::Now() + kPatience).ok());
  CHECK(ConnectUnix(runtime_dir + "/pages.sock", SOCK_SEQPACKET, absl::Now() + kPatience).ok());
  auto client = Client::Connect({runtime_dir, "end_to_end_sim_test", kPatience});
  INFO(daemon.Errors());
  REQUIRE(client.ok());
  grpc::ClientContext context;
  v1::GetStatusResponse response;
  CHECK((*client)->service().GetStatus(&context, v1::GetStatusRequest(), &response).ok());
  CHECK(ready.text == "READY=1");
  // The process that was started is the one that serves, in its foreground.
  CHECK(ready.pid == daemon.pid());
  CHECK(response.status().daemon().pid() == daemon.pid());
  CHECK_FALSE(daemon.EndsWithin(absl::ZeroDuration()));

  daemon.Signal(SIGTERM);
  const NotifySocket::Message stopping = manager.Next();
  CHECK(stopping.text == "STOPPING=1");
  CHECK(stopping.pid == daemon.pid());
  CHECK(daemon.Wait() == 0);
  CHECK(manager.Next(absl::ZeroDuration()).text.empty());
}

TEST_CASE("A daemon that cannot start does not say that it is ready") {
  ScratchDirectory scratch;
  NotifySocket manager(scratch.path() + "/notify");
  std::ofstream(scratch.path() + "/plain file");
  TestProcess daemon({"/usr/bin/env", absl::StrCat("NOTIFY_SOCKET=", scratch.path(), "/notify"),
                      ProgramPath("residencyd"), "--driver=sim", "--runtime_dir", scratch.path() + "/plain file"},
                     scratch.path() + "/errors");
  CHECK(daemon.Wait() == 1);
  CHECK(manager.Next(absl::ZeroDuration()).text.empty());
}

TEST_CASE("The unit waits for READY=1, and lifts the limit on locked memory only together with a limit on memory") {
  std::ifstream file("deploy/residencyd.service");
  REQUIRE(file.good());
  std::vector<std::string> service;
  std::string section;
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, "[")) section = line;
    if (section == "[Service]" && !absl::StartsWith(line, "#")) service.push_back(line);
  }
  const auto count = [&](const std::string& start) {
    return std::count_if(service.begin(), service.end(),
                         [&](const std::string& line) { return absl::StartsWith(line, start); });
  };
  const auto has = [&](const std::string& line) { return std::count(service.begin(), service.end(), line) == 1; };
  CHECK(has("Type=notify"));
  CHECK(has("LimitMEMLOCK=infinity"));
  CHECK(count("MemoryMax=") == 1);
  CHECK_FALSE(has("MemoryMax="));
  CHECK_FALSE(has("MemoryMax=infinity"));
  for (const char* once : {"Type=", "LimitMEMLOCK=", "ExecStart="}) CHECK(count(once) == 1);
}

}  // namespace
}  // namespace residency
