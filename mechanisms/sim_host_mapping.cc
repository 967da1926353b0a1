// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_host_mapping.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

namespace residency {
namespace {

SimHostMemory KindOf(const std::string& path, bool shared) {
  // Names without a slash are the kernel's own: [heap], [stack]. A memfd and shared anonymous memory have one that is
  // no path.
  if (path.empty() || path.front() != '/') return SimHostMemory::kPlain;
  for (const char* memory : {"/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage"}) {
    if (path.starts_with(memory)) return SimHostMemory::kPlain;
  }
  if (!shared) return SimHostMemory::kPrivateFile;
  struct statfs system;
  if (::statfs(path.c_str(), &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == HUGETLBFS_MAGIC)) {
    return SimHostMemory::kTmpfs;
  }
  return SimHostMemory::kSharedFile;
}

}  // namespace

SimHostMemory SimHostMemoryAt(uint64_t begin, uint64_t end) {
  SimHostMemory kind = SimHostMemory::kPlain;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uint64_t first = 0;
    uint64_t last = 0;
    char rights[5] = {};
    int path_at = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %*s %n", &first, &last, rights, &path_at) < 3) {
      continue;
    }
    if (last <= begin || end <= first) continue;
    kind = std::max(kind, KindOf(line.substr(static_cast<size_t>(path_at)), rights[3] == 's'));
  }
  return kind;
}

}  // namespace residency
