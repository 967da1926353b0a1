// SPDX-License-Identifier: Apache-2.0
//
// A child process as a test sees it: lines out, lines in, signals, an end. Every wait has a deadline, and one that
// passes fails the test with what was waited for. Main thread.
#ifndef RESIDENCY_TESTS_TEST_PROCESS_H_
#define RESIDENCY_TESTS_TEST_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "mechanisms/unique_fd.h"

namespace residency {

// Far beyond what anything here takes, also under a sanitizer on a busy machine.
inline constexpr absl::Duration kPatience = absl::Seconds(40);

class TestProcess {
 public:
  // Starts `arguments[0]` with the caller's environment, without what would point it at another daemon. Standard input
  // and output are pipes to here; standard error is appended to the file `error_path`.
  TestProcess(const std::vector<std::string>& arguments, std::string error_path);
  // Kills it where it has not ended.
  ~TestProcess();
  TestProcess(const TestProcess&) = delete;
  TestProcess& operator=(const TestProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // Kills it with SIGKILL, and returns once it is gone.
  void Kill();
  // Waits until it has ended: its exit status, or minus the signal that ended it.
  int Wait(absl::Duration patience = kPatience);
  // Whether it has ended by then.
  bool EndsWithin(absl::Duration time) const;

  void WriteLine(const std::string& line);
  // Closes its standard input.
  void EndInput() { input_.reset(); }
  // The next line of standard output.
  std::string ReadLine(absl::Duration patience = kPatience);
  // Whether a line comes within `time`.
  bool HasLineWithin(absl::Duration time);
  // All that is left of standard output, to its end.
  std::string ReadAll(absl::Duration patience = kPatience);
  // What it wrote to standard error so far.
  std::string Errors() const;

 private:
  bool Fill(absl::Time deadline);
  [[noreturn]] void Fail(const std::string& waited_for) const;

  const std::string name_;
  const std::string error_path_;
  pid_t pid_ = 0;
  UniqueFd pidfd_;
  UniqueFd input_;
  UniqueFd output_;
  std::string read_;
  bool output_ended_ = false;
  std::optional<int> ended_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_TEST_PROCESS_H_
