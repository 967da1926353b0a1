// SPDX-License-Identifier: Apache-2.0
//
// A residencyd of a test's own, in a directory of its own, and the programs that talk to it, all as processes. The
// driver is RESIDENCY_TEST_DRIVER (sim where it is not set, or cuda). Programs are looked for in RESIDENCY_BIN_DIR,
// then where the build or the bundle has them. Main thread.
#ifndef RESIDENCY_TESTS_DAEMON_RIG_H_
#define RESIDENCY_TESTS_DAEMON_RIG_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/test_process.h"

namespace residency {

using Json = nlohmann::json;

bool OnSim();
// residencyd, residencyctl or a program of the tests.
std::string ProgramPath(const std::string& name);

// How a command ended.
struct Outcome {
  int exit_status = 0;
  std::string output;
  std::string errors;
  absl::Duration duration;

  // Of the output, which is one document.
  Json Document() const;
};

// A new directory that goes with the object.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class DaemonRig {
 public:
  // `launcher` is the command of a program that ends in an exec of the daemon's, which it is given.
  explicit DaemonRig(std::vector<std::string> flags = {}, std::vector<std::string> launcher = {});
  // Ends the daemon; shows its log where the test has failed.
  ~DaemonRig();
  DaemonRig(const DaemonRig&) = delete;
  DaemonRig& operator=(const DaemonRig&) = delete;

  // Starts a daemon on the same directory, once the one before has ended, and waits until it serves.
  void Start();
  TestProcess& daemon() { return *daemon_; }
  const std::string& runtime_dir() const { return runtime_dir_; }
  // The path of a file of the test's.
  std::string Path(const std::string& name) const { return directory_.path() + "/" + name; }
  std::vector<std::string> DaemonCommand() const;

  // Runs residencyctl to its end.
  Outcome Ctl(const std::vector<std::string>& arguments);
  // The same with --json, for what must succeed: its document.
  Json Do(std::vector<std::string> arguments);
  // The same for what the daemon must refuse: the error. `exit_status` is what residencyctl must end with.
  Json Refused(std::vector<std::string> arguments, int exit_status = 1);
  // Starts residencyctl.
  std::unique_ptr<TestProcess> StartCtl(const std::vector<std::string>& arguments);
  // Starts a program of the tests, with the runtime directory before `arguments`.
  std::unique_ptr<TestProcess> StartProgram(const std::string& name, const std::vector<std::string>& arguments);

  Json Status() { return Do({"status"}); }
  Json Device() { return Status().at("devices").at(0); }
  Json Model(const std::string& name) { return Do({"status", name}).at("models").at(0); }
  // Asks for the status until `holds` says yes of it; fails with `what` where that takes longer than `patience`.
  void Await(const std::string& what, const std::function<bool(const Json&)>& holds,
             absl::Duration patience = kPatience);
  // Waits until the device has as much free as before, to the byte where nobody else can use it.
  void AwaitFree(uint64_t free_bytes);

 private:
  std::string NewErrorPath();

  const std::vector<std::string> flags_;
  const std::vector<std::string> launcher_;
  const ScratchDirectory directory_;
  const std::string runtime_dir_;
  std::unique_ptr<TestProcess> daemon_;
  int processes_ = 0;
};

// A reader_client on `model`, attached.
class ReaderClient {
 public:
  ReaderClient(DaemonRig& rig, const std::string& model);

  TestProcess& process() { return *process_; }
  // One command, one answer.
  Json Ask(const std::string& command);
  // Asks until the answer is an error, which it is once the client has heard that its daemon is gone.
  Json AskUntilRefused(const std::string& command);
  void Send(const std::string& command) { process_->WriteLine(command); }
  Json Answer() { return Json::parse(process_->ReadLine()); }

 private:
  std::unique_ptr<TestProcess> process_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_DAEMON_RIG_H_
