// SPDX-License-Identifier: Apache-2.0
#include "tests/test_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "mechanisms/page_channel.h"

extern char** environ;

namespace residency {
namespace {

// What would lead a child to another daemon, or to a driver that fails.
constexpr std::array<std::string_view, 4> kDroppedVariables = {
    "RESIDENCY_RUNTIME_DIR=", "RESIDENCY_SIM_DIR=", "RESIDENCY_SIM_FAULTS=", "XDG_RUNTIME_DIR="};

std::vector<char*> Environment() {
  std::vector<char*> kept;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const auto is_prefix = [text](std::string_view dropped) { return text.starts_with(dropped); };
    if (std::none_of(kDroppedVariables.begin(), kDroppedVariables.end(), is_prefix)) kept.push_back(*variable);
  }
  kept.push_back(nullptr);
  return kept;
}

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Pipe MakePipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// False at the deadline.
bool AwaitReadable(int fd, absl::Time deadline) {
  while (true) {
    const int64_t left = std::clamp<int64_t>(absl::ToInt64Milliseconds(deadline - absl::Now()) + 1, 0, 1 << 30);
    pollfd poller{fd, POLLIN, 0};
    const int ready = poll(&poller, 1, static_cast<int>(left));
    if (ready > 0) return true;
    if (ready == 0 && absl::Now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) throw std::runtime_error("poll failed");
  }
}

pid_t Spawn(const std::vector<std::string>& arguments, int input, int output, const std::string& error_path) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, error_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  // This process ignores SIGPIPE, which a child would inherit.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t defaults;
  sigemptyset(&defaults);
  sigaddset(&defaults, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0], &actions, &attributes, argv.data(), Environment().data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error(absl::StrCat("cannot start ", arguments[0], ", errno ", error));
  return pid;
}

}  // namespace

TestProcess::TestProcess(const std::vector<std::string>& arguments, std::string error_path)
    : name_(absl::StrJoin(arguments, " ")), error_path_(std::move(error_path)) {
  signal(SIGPIPE, SIG_IGN);
  Pipe input = MakePipe();
  Pipe output = MakePipe();
  pid_ = Spawn(arguments, input.read.get(), output.write.get(), error_path_);
  auto pidfd = OpenPidfd(pid_);
  if (!pidfd.ok()) throw std::runtime_error(pidfd.status().ToString());
  pidfd_ = *std::move(pidfd);
  input_ = std::move(input.write);
  output_ = std::move(output.read);
}

TestProcess::~TestProcess() {
  if (ended_.has_value()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void TestProcess::Signal(int signal) const {
  if (!ended_.has_value()) kill(pid_, signal);
}

void TestProcess::Kill() {
  Signal(SIGKILL);
  Wait();
}

int TestProcess::Wait(absl::Duration patience) {
  if (ended_.has_value()) return *ended_;
  if (!AwaitReadable(pidfd_.get(), absl::Now() + patience)) Fail("to end");
  int status = 0;
  if (waitpid(pid_, &status, 0) != pid_) throw std::runtime_error("waitpid failed");
  ended_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return *ended_;
}

bool TestProcess::EndsWithin(absl::Duration time) const {
  return ended_.has_value() || AwaitReadable(pidfd_.get(), absl::Now() + time);
}

void TestProcess::WriteLine(const std::string& line) {
  const std::string text = absl::StrCat(line, "\n");
  if (write(input_.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) Fail("to read its input");
}

// Reads what there is, waiting for something; false at the deadline or at the end of the output.
bool TestProcess::Fill(absl::Time deadline) {
  if (output_ended_ || !AwaitReadable(output_.get(), deadline)) return false;
  char bytes[65536];
  const ssize_t count = read(output_.get(), bytes, sizeof(bytes));
  if (count < 0) throw std::runtime_error("reading a child's output failed");
  output_ended_ = count == 0;
  read_.append(bytes, static_cast<size_t>(count));
  return !output_ended_;
}

std::string TestProcess::ReadLine(absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (read_.find('\n') == std::string::npos) {
    if (!Fill(deadline)) Fail("to write a line");
  }
  const size_t end = read_.find('\n');
  std::string line = read_.substr(0, end);
  read_.erase(0, end + 1);
  return line;
}

bool TestProcess::HasLineWithin(absl::Duration time) {
  const absl::Time deadline = absl::Now() + time;
  while (read_.find('\n') == std::string::npos) {
    if (!Fill(deadline)) return false;
  }
  return true;
}

std::string TestProcess::ReadAll(absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (Fill(deadline)) {
  }
  if (!output_ended_) Fail("to close its output");
  return std::exchange(read_, "");
}

std::string TestProcess::Errors() const {
  std::ifstream file(error_path_);
  return {std::istreambuf_iterator<char>(file), {}};
}

void TestProcess::Fail(const std::string& waited_for) const {
  FAIL("waited in vain for this process " << waited_for << ": " << name_ << "\nits output: " << read_
                                          << "\nits errors: " << Errors());
  throw std::logic_error("FAIL throws");
}

}  // namespace residency
