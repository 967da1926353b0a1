// SPDX-License-Identifier: Apache-2.0
#include "tests/memory_cgroup.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace residency {
namespace {

namespace fs = std::filesystem;

bool Write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  return file.good();
}

// The directory of this process's memory cgroup, at the usual places.
std::string OwnDirectory(bool version2) {
  std::ifstream lines("/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (version2 && parts[1].empty()) return absl::StrCat("/sys/fs/cgroup", parts[2]);
    if (!version2 && parts[1] == "memory") return absl::StrCat("/sys/fs/cgroup/memory", parts[2]);
  }
  return "";
}

}  // namespace

std::unique_ptr<MemoryCgroup> MemoryCgroup::Make(uint64_t limit_bytes) {
  for (const bool version2 : {false, true}) {
    const std::string own = OwnDirectory(version2);
    if (own.empty() || !fs::exists(own)) continue;
    const std::string directory = absl::StrCat(own, "/residency-test-", getpid());
    std::error_code error;
    if (!fs::create_directory(directory, error)) continue;
    std::unique_ptr<MemoryCgroup> made(new MemoryCgroup(directory, version2));
    const char* limit = version2 ? "/memory.max" : "/memory.limit_in_bytes";
    // Without the controller there is no such file, nor may one be made.
    if (fs::exists(directory + limit) && Write(directory + limit, absl::StrCat(limit_bytes))) return made;
  }
  return nullptr;
}

MemoryCgroup::~MemoryCgroup() {
  std::ifstream pids(directory_ + "/cgroup.procs");
  for (std::string pid; std::getline(pids, pid);) Write(OwnDirectory(version2_) + "/cgroup.procs", pid);
  // Its files are the kernel's: only rmdir takes it away.
  rmdir(directory_.c_str());
}

void MemoryCgroup::Add(pid_t pid) const {
  if (!Write(directory_ + "/cgroup.procs", absl::StrCat(pid))) throw std::runtime_error("cannot add to " + directory_);
}

uint64_t MemoryCgroup::oom_kills() const {
  std::ifstream events(directory_ + (version2_ ? "/memory.events" : "/memory.oom_control"));
  std::string key;
  for (uint64_t value = 0; events >> key >> value;) {
    if (key == "oom_kill") return value;
  }
  throw std::runtime_error(directory_ + " does not count OOM kills");
}

}  // namespace residency
