// SPDX-License-Identifier: Apache-2.0
//
// What host memory of this process is made of, as the kernel says (/proc/self/maps): a real driver takes some of it for
// registration and some not. Any thread.
#ifndef RESIDENCY_MECHANISMS_SIM_HOST_MAPPING_H_
#define RESIDENCY_MECHANISMS_SIM_HOST_MAPPING_H_

#include <cstdint>

namespace residency {

enum class SimHostMemory {
  kPlain,        // anonymous memory, a memfd
  kTmpfs,        // a file in memory, shared: it can be cut, but has no disk to be written to
  kSharedFile,   // a file of another kind, shared
  kPrivateFile,  // a file of either kind, private
};

// Of the range, which is mapped; the most special kind where it has several.
SimHostMemory SimHostMemoryAt(uint64_t begin, uint64_t end);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_HOST_MAPPING_H_
