// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says a process has, for tests that look for leaks.
#ifndef RESIDENCY_TESTS_PROCESS_COUNTS_H_
#define RESIDENCY_TESTS_PROCESS_COUNTS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace residency {

struct ProcessCounts {
  size_t descriptors = 0;
  size_t threads = 0;
  // Those that gRPC does not start and end as it likes (its pools grow with what is asked at a time).
  size_t own_threads = 0;
  uint64_t resident_bytes = 0;
};

ProcessCounts CountsOf(pid_t pid);

// The same once descriptors and threads have been as many for 200 ms, or after 5 s: gRPC gives connections that have
// ended up in its own time. A test that has just ended a client asks for these.
ProcessCounts SettledCountsOf(pid_t pid);

// The number and target of each of its descriptors that an exec would hand on.
std::vector<std::string> DescriptorsKeptOnExec(pid_t pid);

// The files that are mapped into it.
std::vector<std::string> MappedFiles(pid_t pid);

}  // namespace residency

#endif  // RESIDENCY_TESTS_PROCESS_COUNTS_H_
