// SPDX-License-Identifier: Apache-2.0
//
// A block reader reads from files into buffers, a few reads at a time. It knows nothing of models, retries nothing
// but interruptions, and reports what the kernel said. One object belongs to one thread.
#ifndef RESIDENCY_MECHANISMS_REFILL_READER_H_
#define RESIDENCY_MECHANISMS_REFILL_READER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"

namespace residency {

// Direct reads begin, end and land on multiples of this. Disks ask for their sector, at most 4096 bytes.
inline constexpr uint64_t kReadAlignment = 4096;

struct BlockRead {
  int fd = -1;
  uint64_t file_offset = 0;
  std::byte* buffer = nullptr;  // stays writable until Wait has answered for it
  uint64_t bytes = 0;
};

struct BlockResult {
  uint32_t slot = 0;
  int64_t result = 0;  // bytes read, 0 at the end of the file, or a negated errno value
};

class BlockReader {
 public:
  virtual ~BlockReader() = default;

  // Starts `read` under the number `slot`, which is less than the reader's slots and not under way.
  virtual void Start(uint32_t slot, const BlockRead& read) = 0;

  // Waits for one of the reads under way. Called only while there is one.
  virtual BlockResult Wait() = 0;
};

// Makes a reader with that many slots.
using BlockReaderFactory = std::function<absl::StatusOr<std::unique_ptr<BlockReader>>(uint32_t slots)>;

// Reads by pread, one read at a time.
absl::StatusOr<std::unique_ptr<BlockReader>> MakePreadReader(uint32_t slots);

// Reads by io_uring. UNAVAILABLE/NO_URING where the system refuses it: an old kernel, a container's filter, a
// sysctl, a limit on locked memory.
absl::StatusOr<std::unique_ptr<BlockReader>> MakeUringReader(uint32_t slots);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_REFILL_READER_H_
