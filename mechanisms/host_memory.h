// SPDX-License-Identifier: Apache-2.0
//
// How much memory this process may still take of its host: what the kernel calls available, and what the memory
// cgroups around the process leave, of version 1 (memory.limit_in_bytes) and 2 (memory.max), the ancestors' included.
// Any thread.
#ifndef RESIDENCY_MECHANISMS_HOST_MEMORY_H_
#define RESIDENCY_MECHANISMS_HOST_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "mechanisms/units.h"

namespace residency {

// MemAvailable that mirrors leave alone. The figure is the kernel's estimate, of which a part cannot be had in time,
// and whatever else runs here, this process's staging, stacks and tables included, lives of it too; page-locked
// memory is what the kernel cannot take back then. It is as much as is left to the rest of a cgroup.
inline constexpr uint64_t kHostReserveBytes = kGiB;
// Of a cgroup's limit, the part that mirrors leave to everything else in it.
inline constexpr uint64_t kCgroupReserveBytes = kGiB;

// What could not be read, or has no limit, is absent.
struct HostMemory {
  std::optional<uint64_t> available_bytes;         // MemAvailable
  std::optional<uint64_t> cgroup_limit_bytes;      // the least of the cgroup and its ancestors
  std::optional<uint64_t> cgroup_available_bytes;  // the least of what these leave, page cache counted as free

  // What mirrors may take beyond what is there now.
  std::optional<uint64_t> room_bytes() const;
  // Most bytes of all mirrors together, where a cgroup limits them.
  std::optional<uint64_t> mirror_limit_bytes() const;
};

// A mounted cgroup file system: its directory, and which cgroup that is.
struct CgroupMount {
  std::string directory;
  std::string cgroup;
};

class HostMemoryReader {
 public:
  // Finds where the memory controllers of both versions are mounted, once: on a host of containers the table of mounts
  // has thousands of lines, 1 to 2 us each. `root` is the directory that has proc and the mount points of the cgroup
  // file systems, "" for the system's.
  explicit HostMemoryReader(std::string root = "");

  // As it is now, in whichever cgroup this process is by then: a dozen small files of /proc and of the cgroup file
  // systems, some 100 us, also with 2,000 cgroups below.
  HostMemory Read() const;

 private:
  const std::string root_;
  std::optional<CgroupMount> version1_;
  std::optional<CgroupMount> version2_;
};

// For who asks once.
inline HostMemory ReadHostMemory(const std::string& root = "") { return HostMemoryReader(root).Read(); }

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_HOST_MEMORY_H_
