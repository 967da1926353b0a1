// SPDX-License-Identifier: Apache-2.0
//
// A memory cgroup of a test's own, below that of the test, of whichever version the machine has.
#ifndef RESIDENCY_TESTS_MEMORY_CGROUP_H_
#define RESIDENCY_TESTS_MEMORY_CGROUP_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace residency {

class MemoryCgroup {
 public:
  // Nothing where this process may not make one.
  static std::unique_ptr<MemoryCgroup> Make(uint64_t limit_bytes);
  // Puts the processes that are still in it back where it was made.
  ~MemoryCgroup();
  MemoryCgroup(const MemoryCgroup&) = delete;
  MemoryCgroup& operator=(const MemoryCgroup&) = delete;

  void Add(pid_t pid) const;
  // How often the OOM killer acted in it.
  uint64_t oom_kills() const;

 private:
  MemoryCgroup(std::string directory, bool version2) : directory_(std::move(directory)), version2_(version2) {}

  const std::string directory_;
  const bool version2_;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_MEMORY_CGROUP_H_
