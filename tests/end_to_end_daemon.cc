// SPDX-License-Identifier: Apache-2.0
//
// The daemon's own end, its successor and its rivals.
#include <catch2/catch.hpp>
#include <csignal>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/daemon_rig.h"
#include "tests/test_checkpoints.h"

namespace residency {
namespace {

TEST_CASE("SIGTERM ends the daemon within five seconds, whoever is attached, watches or is stopped") {
  DaemonRig rig;
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  ReaderClient attached(rig, "flux");
  ReaderClient in_use(rig, "flux");
  in_use.Ask("use");
  ReaderClient stopped(rig, "flux");
  const auto watcher = rig.StartCtl({"status", "--watch", "--json"});
  watcher->ReadLine();
  stopped.process().Signal(SIGSTOP);

  const absl::Time start = absl::Now();
  rig.daemon().Signal(SIGTERM);
  CHECK(rig.daemon().Wait(absl::Seconds(10)) == 0);
  CHECK(absl::Now() - start < absl::Seconds(5));
  CHECK(watcher->Wait(absl::Seconds(5)) != 0);
  CHECK(attached.AskUntilRefused("hash").at("error").at("code") == "UNAVAILABLE");
  CHECK(in_use.Ask("leave") == Json::object());
}

TEST_CASE("SIGINT ends the daemon as SIGTERM does") {
  DaemonRig rig;
  rig.daemon().Signal(SIGINT);
  CHECK(rig.daemon().Wait(absl::Seconds(5)) == 0);
}

TEST_CASE("A second daemon on the same directory is refused with the pid of the first") {
  DaemonRig rig;
  TestProcess rival(rig.DaemonCommand(), rig.Path("rival"));
  CHECK(rival.Wait() == 1);
  INFO(rival.Errors());
  CHECK(absl::StrContains(rival.Errors(), "ALREADY_EXISTS/RUNNING"));
  CHECK(absl::StrContains(rival.Errors(), absl::StrCat("pid ", rig.daemon().pid())));
  CHECK(rig.Status().at("daemon").at("pid") == rig.daemon().pid());
}

TEST_CASE("After the daemon was killed a new one starts on its directory, and old clients are told, not harmed") {
  DaemonRig rig;
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  ReaderClient old(rig, "flux");
  CHECK(old.Ask("hash").at("sha256") == TrueHashes("flux-like"));
  const std::string epoch = rig.Status().at("daemon").at("epoch");

  rig.daemon().Kill();
  const absl::Time start = absl::Now();
  rig.Start();
  CHECK(absl::Now() - start < absl::Seconds(5));
  const Json status = rig.Status();
  CHECK(status.at("daemon").at("epoch") != epoch);
  CHECK(status.at("models").empty());
  const Json refused = old.AskUntilRefused("hash");
  INFO(refused.dump());
  CHECK(refused.at("error").at("code") == "UNAVAILABLE");
  CHECK(refused.at("error").at("reason") == "DAEMON_GONE");
  // It still has the memory that its first daemon lent it, which is nobody's of the new one.
  CHECK(status.at("devices")[0].at("broker_bytes") == 0);

  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  ReaderClient fresh(rig, "flux");
  CHECK(fresh.Ask("hash").at("sha256") == TrueHashes("flux-like"));
}

TEST_CASE("What a daemon decided until it was killed is decided the same again from its recording") {
  const ScratchDirectory scratch;
  const std::string recording = scratch.path() + "/recording";
  DaemonRig rig({"--record", recording});
  rig.Do({"register", "flux", RealCheckpoint("flux-like")});
  rig.Refused({"register", "flux", RealCheckpoint("whisper-fp16")});
  ReaderClient reader(rig, "flux");
  reader.Ask("use");
  rig.Refused({"deactivate", "flux"});
  reader.Ask("leave");
  rig.Do({"deactivate", "flux"});
  rig.Do({"activate", "flux"});
  rig.daemon().Kill();

  TestProcess replay({ProgramPath("residencyd"), "--replay", recording}, rig.Path("replay"));
  const std::string verdict = replay.ReadAll();
  INFO(verdict << replay.Errors());
  CHECK(replay.Wait() == 0);
  CHECK(absl::EndsWith(verdict, " effects: the same decisions\n"));
  CHECK_FALSE(absl::StartsWith(verdict, "0 steps"));

  TestProcess successor(rig.DaemonCommand(), rig.Path("successor"));
  CHECK(successor.Wait() == 1);
  INFO(successor.Errors());
  CHECK(absl::StrContains(successor.Errors(), "ALREADY_EXISTS/FILE_EXISTS: " + recording));
}

}  // namespace
}  // namespace residency
