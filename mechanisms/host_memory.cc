// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// Version 1 says "no limit" by the largest multiple of a page. No host has half of that.
constexpr uint64_t kNoLimitBytes = uint64_t{1} << 62;

using Bytes = std::optional<uint64_t>;

// The names of what differs between the two versions.
struct CgroupFiles {
  std::string limit;
  std::string usage;
  std::string cache;  // in memory.stat, with shared memory
  std::string shmem;
};
const CgroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"};
const CgroupFiles kVersion2{"memory.max", "memory.current", "file", "shmem"};

Bytes Least(Bytes a, Bytes b) { return a.has_value() && b.has_value() ? std::min(*a, *b) : (a.has_value() ? a : b); }

std::vector<std::string> Lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

Bytes Number(const std::string& text) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

// The number behind `key` in a file of lines "key number", with or without a colon.
Bytes Field(const std::vector<std::string>& lines, std::string_view key) {
  for (const std::string& line : lines) {
    const std::vector<std::string> words = absl::StrSplit(line, absl::ByAnyChar(": \t"), absl::SkipEmpty());
    if (words.size() >= 2 && words[0] == key) return Number(words[1]);
  }
  return std::nullopt;
}

Bytes FirstNumber(const std::string& path) {
  const std::vector<std::string> lines = Lines(path);
  return lines.empty() ? std::nullopt : Number(lines.front());
}

// One directory of a cgroup file system.
void AddLevel(const std::string& directory, const CgroupFiles& files, HostMemory& memory) {
  const Bytes limit_bytes = FirstNumber(absl::StrCat(directory, "/", files.limit));
  if (!limit_bytes.has_value() || *limit_bytes >= kNoLimitBytes) return;
  memory.cgroup_limit_bytes = Least(memory.cgroup_limit_bytes, limit_bytes);
  const Bytes usage_bytes = FirstNumber(absl::StrCat(directory, "/", files.usage));
  if (!usage_bytes.has_value()) return;
  // The cache of files gives way to whoever asks; shared memory, in which mirrors live, is counted in it and does not.
  const std::vector<std::string> stat = Lines(absl::StrCat(directory, "/memory.stat"));
  const uint64_t cache_bytes =
      SaturatingSubtract(Field(stat, files.cache).value_or(0), Field(stat, files.shmem).value_or(0));
  memory.cgroup_available_bytes = Least(
      memory.cgroup_available_bytes, SaturatingSubtract(*limit_bytes, SaturatingSubtract(*usage_bytes, cache_bytes)));
}

// From mountinfo(5), the file system of version 2, or that of version 1's memory controller.
std::optional<CgroupMount> FindMount(const std::vector<std::string>& mountinfo, bool version2) {
  for (const std::string& line : mountinfo) {
    const std::pair<std::string, std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    const std::vector<std::string> mount = absl::StrSplit(halves.first, ' ');
    const std::vector<std::string> type = absl::StrSplit(halves.second, ' ');
    if (mount.size() < 5 || type.size() < 3 || type[0] != (version2 ? "cgroup2" : "cgroup")) continue;
    const std::vector<std::string> options = absl::StrSplit(type[2], ',');
    if (!version2 && std::find(options.begin(), options.end(), "memory") == options.end()) continue;
    return CgroupMount{mount[4], mount[3]};
  }
  return std::nullopt;
}

// `path` as seen from `mount`, "" for the mount's own cgroup, which is also the answer where the cgroup lies outside
// of what is mounted here.
std::string Below(const CgroupMount& mount, const std::string& path) {
  const std::string prefix = mount.cgroup == "/" ? "" : mount.cgroup;
  if (path.size() <= prefix.size() || !path.starts_with(prefix) || path[prefix.size()] != '/') return "";
  std::string below = path.substr(prefix.size());
  if (below.find("/..") != std::string::npos) return "";
  while (!below.empty() && below.back() == '/') below.pop_back();
  return below;
}

}  // namespace

Bytes HostMemory::room_bytes() const {
  Bytes room = available_bytes;
  if (room.has_value()) room = SaturatingSubtract(*room, kHostReserveBytes);
  if (!cgroup_available_bytes.has_value()) return room;
  return Least(room, SaturatingSubtract(*cgroup_available_bytes, kCgroupReserveBytes));
}

Bytes HostMemory::mirror_limit_bytes() const {
  if (!cgroup_limit_bytes.has_value()) return std::nullopt;
  return SaturatingSubtract(*cgroup_limit_bytes, kCgroupReserveBytes);
}

HostMemoryReader::HostMemoryReader(std::string root) : root_(std::move(root)) {
  const std::vector<std::string> mountinfo = Lines(absl::StrCat(root_, "/proc/self/mountinfo"));
  version1_ = FindMount(mountinfo, /*version2=*/false);
  version2_ = FindMount(mountinfo, /*version2=*/true);
}

HostMemory HostMemoryReader::Read() const {
  HostMemory memory;
  const Bytes available_kib = Field(Lines(absl::StrCat(root_, "/proc/meminfo")), "MemAvailable");
  if (available_kib.has_value() && *available_kib < kNoLimitBytes / kKiB)
    memory.available_bytes = *available_kib * kKiB;
  for (const std::string& line : Lines(absl::StrCat(root_, "/proc/self/cgroup"))) {
    // "0::/path" is version 2's, "4:cpu,memory:/path" one of version 1's.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const bool version2 = parts[1].empty();
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (!version2 && std::find(controllers.begin(), controllers.end(), "memory") == controllers.end()) continue;
    const std::optional<CgroupMount>& mount = version2 ? version2_ : version1_;
    if (!mount.has_value()) continue;
    // From the cgroup up to the root of what is mounted.
    for (std::string below = Below(*mount, parts[2]);; below.resize(below.rfind('/'))) {
      AddLevel(absl::StrCat(root_, mount->directory, below), version2 ? kVersion2 : kVersion1, memory);
      if (below.empty()) break;
    }
  }
  return memory;
}

}  // namespace residency
