// SPDX-License-Identifier: Apache-2.0
#include "tests/process_counts.h"

#include <fcntl.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

std::string ProcPath(pid_t pid, const std::string& name) { return absl::StrCat("/proc/", pid, "/", name); }

// The value of a line `key: value`.
uint64_t Field(const std::string& path, const std::string& key, int base = 10) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::stoull(line.substr(key.size() + 1), nullptr, base);
  }
  throw std::runtime_error(absl::StrCat("no ", key, " in ", path));
}

bool IsOfGrpc(const std::string& thread) {
  for (const char* name :
       {"event_engine", "grpc", "nexting_thread", "timer_manager", "default-executo", "resolver-execut"}) {
    if (thread.rfind(name, 0) == 0) return true;
  }
  return false;
}

}  // namespace

ProcessCounts CountsOf(pid_t pid) {
  ProcessCounts counts;
  const fs::directory_iterator descriptors(ProcPath(pid, "fd"));
  counts.descriptors = static_cast<size_t>(std::distance(begin(descriptors), end(descriptors)));
  for (const auto& thread : fs::directory_iterator(ProcPath(pid, "task"))) {
    std::ifstream file(thread.path() / "comm");
    std::string name;
    if (!std::getline(file, name)) continue;  // ended meanwhile
    ++counts.threads;
    if (!IsOfGrpc(name)) ++counts.own_threads;
  }
  counts.resident_bytes = Field(ProcPath(pid, "status"), "VmRSS") * 1024;
  return counts;
}

ProcessCounts SettledCountsOf(pid_t pid) {
  ProcessCounts counts = CountsOf(pid);
  for (int looks = 0, unchanged = 0; looks < 500 && unchanged < 20; ++looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const ProcessCounts now = CountsOf(pid);
    const bool same = now.descriptors == counts.descriptors && now.own_threads == counts.own_threads;
    unchanged = same ? unchanged + 1 : 0;
    counts = now;
  }
  return counts;
}

std::vector<std::string> DescriptorsKeptOnExec(pid_t pid) {
  std::vector<std::string> kept;
  for (const auto& entry : fs::directory_iterator(ProcPath(pid, "fd"))) {
    const std::string number = entry.path().filename();
    uint64_t flags = 0;
    try {
      flags = Field(ProcPath(pid, "fdinfo/" + number), "flags", 8);
    } catch (const std::runtime_error&) {
      continue;  // closed meanwhile
    }
    if ((flags & O_CLOEXEC) != 0) continue;
    std::error_code gone;
    kept.push_back(absl::StrCat(number, " ", fs::read_symlink(entry.path(), gone).string()));
  }
  return kept;
}

std::vector<std::string> MappedFiles(pid_t pid) {
  std::vector<std::string> files;
  std::ifstream maps(ProcPath(pid, "maps"));
  for (std::string line; std::getline(maps, line);) {
    if (const size_t path = line.find('/'); path != std::string::npos) files.push_back(line.substr(path));
  }
  return files;
}

}  // namespace residency
