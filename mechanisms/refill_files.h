// SPDX-License-Identifier: Apache-2.0
//
// The files of one refill: opened when the first block is read, compared with what the manifest saw then and again
// after the last block, and closed. Not thread-safe; the refill's mutex guards it.
#ifndef RESIDENCY_MECHANISMS_REFILL_FILES_H_
#define RESIDENCY_MECHANISMS_REFILL_FILES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/manifest.h"
#include "mechanisms/refill_plan.h"
#include "mechanisms/unique_fd.h"

namespace residency {

class RefillFiles {
 public:
  // `files` must outlive it. `direct`: try O_DIRECT.
  RefillFiles(std::span<const SourceFile> files, std::span<const ReadBlock> blocks, bool direct);

  // A descriptor (borrowed, good until the file's last block is done) to read a block of `file` from.
  absl::StatusOr<int> Open(uint32_t file);

  // A direct read of `file` was refused: from now on it goes through the page cache, reads by descriptors that Open
  // gave out before included. False where nothing was tried directly, so that the refusal means something else.
  bool StopDirect(uint32_t file);

  // A block of `file` was read. After the last one, compares and closes the file.
  absl::Status BlockDone(uint32_t file);

  const SourceFile& source(uint32_t file) const { return files_[file]; }
  uint32_t direct_files() const { return direct_files_; }
  uint32_t buffered_files() const { return buffered_files_; }

 private:
  struct State {
    UniqueFd fd;
    bool direct = false;
    uint64_t blocks_left = 0;
  };

  std::span<const SourceFile> files_;
  std::vector<State> states_;
  bool direct_;
  uint32_t direct_files_ = 0;
  uint32_t buffered_files_ = 0;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_REFILL_FILES_H_
