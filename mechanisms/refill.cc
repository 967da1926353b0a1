// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refill.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mechanisms/refill_files.h"
#include "mechanisms/refill_plan.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

struct FreeDeleter {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Staging = std::unique_ptr<std::byte[], FreeDeleter>;

// A block that a worker has under way, in the slot of the same number.
struct Slot {
  Staging staging;
  ReadBlock block;
  uint64_t index = 0;  // of the block
  int fd = -1;
  uint64_t done_bytes = 0;
  bool fell_back = false;
  uint32_t retries = 0;
};

// A read that the kernel broke off or put off for a moment is asked for again, but not for ever.
constexpr uint32_t kMaxRetries = 16;

// What the workers of one refill share: which block is next, which files are open, and how it ended.
class Refiller {
 public:
  Refiller(std::span<const SourceFile> files, std::span<const ReadPiece> pieces, const std::vector<ReadBlock>& blocks,
           const RefillOptions& options, const RefillCallbacks& callbacks)
      : pieces_(pieces), blocks_(blocks), callbacks_(callbacks), files_(files, blocks, options.direct) {}

  // Reads blocks until there are none or the refill has failed, and leaves no read under way.
  void Work(BlockReader& reader, std::vector<Slot>& slots);

  absl::Status status() const {
    std::lock_guard lock(mutex_);
    return status_;
  }
  RefillReport report() const {
    std::lock_guard lock(mutex_);
    return {
        .read_bytes = read_bytes_, .direct_files = files_.direct_files(), .buffered_files = files_.buffered_files()};
  }

 private:
  bool Take(Slot& slot);
  bool Advance(Slot& slot, int64_t result);
  void Finish(Slot& slot);
  bool MayReadAgain(Slot& slot, int64_t result);
  absl::StatusOr<uint64_t> CopyOut(const Slot& slot) const;
  void Fail(const Slot& slot, absl::Status status);
  void FailLocked(uint64_t block, absl::Status status);

  const std::span<const ReadPiece> pieces_;
  const std::vector<ReadBlock>& blocks_;
  const RefillCallbacks& callbacks_;

  mutable std::mutex mutex_;  // guards what follows
  RefillFiles files_;
  uint64_t next_block_ = 0;
  uint64_t done_bytes_ = 0;
  uint64_t read_bytes_ = 0;
  absl::Status status_;
  uint64_t failed_block_ = 0;
};

BlockRead RestOf(const Slot& slot) {
  // A read that ended inside a page is continued from that page's start, since direct reads know whole pages only.
  const uint64_t from = slot.done_bytes & ~(kReadAlignment - 1);
  return {.fd = slot.fd,
          .file_offset = slot.block.file_offset + from,
          .buffer = slot.staging.get() + from,
          .bytes = slot.block.bytes - from};
}

void Refiller::Work(BlockReader& reader, std::vector<Slot>& slots) {
  std::vector<uint32_t> idle;
  for (uint32_t slot = 0; slot < slots.size(); ++slot) idle.push_back(slot);
  while (true) {
    while (!idle.empty() && Take(slots[idle.back()])) {
      reader.Start(idle.back(), RestOf(slots[idle.back()]));
      idle.pop_back();
    }
    if (idle.size() == slots.size()) return;
    const BlockResult done = reader.Wait();
    Slot& slot = slots[done.slot];
    if (Advance(slot, done.result)) {
      reader.Start(done.slot, RestOf(slot));
      continue;
    }
    idle.push_back(done.slot);
  }
}

// Puts the next block into `slot`; false where there is none or the refill has failed.
bool Refiller::Take(Slot& slot) {
  std::lock_guard lock(mutex_);
  if (!status_.ok() || next_block_ == blocks_.size()) return false;
  slot.index = next_block_++;
  slot.block = blocks_[slot.index];
  slot.done_bytes = 0;
  slot.fell_back = false;
  slot.retries = 0;
  absl::StatusOr<int> fd = files_.Open(slot.block.file);
  if (!fd.ok()) {
    FailLocked(slot.index, fd.status());
    return false;
  }
  slot.fd = *fd;
  return true;
}

// Takes in what a read of `slot` brought. True where the block needs another read, false where it is done for.
bool Refiller::Advance(Slot& slot, int64_t result) {
  if (result < 0) return MayReadAgain(slot, result);
  const uint64_t before = slot.done_bytes;
  const uint64_t now = (before & ~(kReadAlignment - 1)) + static_cast<uint64_t>(result);
  slot.done_bytes = std::max(before, now);
  if (slot.done_bytes >= slot.block.needed_bytes) {
    Finish(slot);
    return false;
  }
  if (now > before) return true;
  std::lock_guard lock(mutex_);
  const std::string& path = files_.source(slot.block.file).path;
  FailLocked(slot.index, Refuse(absl::StatusCode::kDataLoss, {.reason = "FILE_TRUNCATED", .file = path},
                                absl::StrCat(path, " ends at byte ", slot.block.file_offset + slot.done_bytes,
                                             ", and its header promises more")));
  return false;
}

// A read was refused. Once for each block, a refusal of the kind that direct reads meet is answered by reading through
// the page cache.
bool Refiller::MayReadAgain(Slot& slot, int64_t result) {
  std::lock_guard lock(mutex_);
  if (!status_.ok()) return false;
  if ((result == -EINVAL || result == -EOPNOTSUPP) && !slot.fell_back && files_.StopDirect(slot.block.file)) {
    slot.fell_back = true;
    return true;
  }
  if ((result == -EINTR || result == -EAGAIN) && ++slot.retries <= kMaxRetries) return true;
  const std::string& path = files_.source(slot.block.file).path;
  const std::string message = absl::StrCat("reading ", path, " at byte ", slot.block.file_offset + slot.done_bytes);
  if (result == -ENOMEM) {
    FailLocked(slot.index, ErrnoStatus(ENOMEM, message));
  } else {
    FailLocked(slot.index, Refuse(absl::StatusCode::kDataLoss, {.reason = "READ_ERROR", .file = path},
                                  absl::StrCat(message, ": ", std::strerror(static_cast<int>(-result)))));
  }
  return false;
}

void Refiller::Finish(Slot& slot) {
  const absl::StatusOr<uint64_t> copied_bytes = CopyOut(slot);
  std::lock_guard lock(mutex_);
  if (!copied_bytes.ok()) return FailLocked(slot.index, copied_bytes.status());
  done_bytes_ += *copied_bytes;
  read_bytes_ += slot.done_bytes;
  if (absl::Status same = files_.BlockDone(slot.block.file); !same.ok()) FailLocked(slot.index, same);
  if (!status_.ok() || callbacks_.progress == nullptr || callbacks_.progress(done_bytes_)) return;
  FailLocked(slot.index, Refuse(absl::StatusCode::kCancelled, "CANCELLED", "reading was cancelled"));
}

// Copies what the pieces want of the block to where they want it.
absl::StatusOr<uint64_t> Refiller::CopyOut(const Slot& slot) const {
  const uint64_t block_begin = slot.block.file_offset;
  const uint64_t block_end = block_begin + slot.block.needed_bytes;
  uint64_t copied_bytes = 0;
  for (uint32_t i = slot.block.first_piece; i < slot.block.end_piece; ++i) {
    const ReadPiece& piece = pieces_[i];
    const uint64_t begin = std::max(block_begin, piece.file_offset);
    const uint64_t end = std::min(block_end, piece.file_offset + piece.bytes);
    if (begin >= end) continue;
    std::byte* destination = piece.destination + (begin - piece.file_offset);
    if (callbacks_.prepare != nullptr) {
      if (absl::Status ready = callbacks_.prepare(destination, end - begin); !ready.ok()) return ready;
    }
    std::memcpy(destination, slot.staging.get() + (begin - block_begin), end - begin);
    if (callbacks_.copied != nullptr) callbacks_.copied(destination, end - begin);
    copied_bytes += end - begin;
  }
  return copied_bytes;
}

// Of several failures the one of the first block is told, so that the answer depends on timing as little as can be.
void Refiller::FailLocked(uint64_t block, absl::Status status) {
  if (!status_.ok() && failed_block_ <= block) return;
  status_ = std::move(status);
  failed_block_ = block;
}

absl::Status BadPieces(std::string_view message) {
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_PIECES", message);
}

absl::Status CheckArguments(std::span<const SourceFile> files, std::span<const ReadPiece> pieces,
                            const RefillOptions& options) {
  if (options.block_bytes == 0 || options.block_bytes % kReadAlignment != 0) {
    return BadPieces(absl::StrCat("a block of ", options.block_bytes, " bytes is not a number of pages"));
  }
  if (options.queue_depth == 0 || options.workers == 0) return BadPieces("no read can be under way");
  if (pieces.size() > UINT32_MAX) return BadPieces("more than 2^32-1 pieces");
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ReadPiece& piece = pieces[i];
    if (piece.file >= files.size()) return BadPieces(absl::StrCat("piece ", i, " is of a file that is not listed"));
    const SourceFile& file = files[piece.file];
    if (piece.bytes > file.bytes || piece.file_offset > file.bytes - piece.bytes) {
      return BadPieces(absl::StrCat("piece ", i, " reaches past the end of ", file.path));
    }
    if (i > 0 && std::pair(piece.file, piece.file_offset) < std::pair(pieces[i - 1].file, pieces[i - 1].file_offset)) {
      return BadPieces(absl::StrCat("piece ", i, " lies before the one ahead of it"));
    }
  }
  return absl::OkStatus();
}

struct Worker {
  std::unique_ptr<BlockReader> reader;
  std::vector<Slot> slots;
};

absl::StatusOr<std::vector<Worker>> MakeWorkers(uint64_t blocks, const RefillOptions& options,
                                                const BlockReaderFactory& make_reader) {
  const auto count = static_cast<uint32_t>(std::min<uint64_t>({options.workers, options.queue_depth, blocks}));
  std::vector<Worker> workers(count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t slots = options.queue_depth / count + (i < options.queue_depth % count ? 1 : 0);
    absl::StatusOr<std::unique_ptr<BlockReader>> reader = make_reader(slots);
    if (!reader.ok()) return reader.status();
    workers[i].reader = *std::move(reader);
    workers[i].slots.resize(slots);
    for (Slot& slot : workers[i].slots) {
      slot.staging.reset(static_cast<std::byte*>(std::aligned_alloc(kReadAlignment, options.block_bytes)));
      if (slot.staging == nullptr) return ErrnoStatus(ENOMEM, "staging buffers for reading");
    }
  }
  return workers;
}

}  // namespace

absl::StatusOr<RefillReport> RefillThrough(std::span<const SourceFile> files, std::span<const ReadPiece> pieces,
                                           const RefillOptions& options, const RefillCallbacks& callbacks,
                                           const BlockReaderFactory& make_reader) {
  if (absl::Status valid = CheckArguments(files, pieces, options); !valid.ok()) return valid;
  const std::vector<ReadBlock> blocks = PlanBlocks(pieces, options.block_bytes);
  absl::StatusOr<std::vector<Worker>> workers = MakeWorkers(blocks.size(), options, make_reader);
  if (!workers.ok()) return workers.status();
  Refiller refiller(files, pieces, blocks, options, callbacks);
  std::vector<std::thread> threads;
  try {
    for (size_t i = 1; i < workers->size(); ++i) {
      threads.emplace_back([&refiller, &worker = (*workers)[i]] { refiller.Work(*worker.reader, worker.slots); });
    }
  } catch (const std::system_error&) {
    // Where the system gives no more threads, those that there are read everything.
  }
  if (!workers->empty()) refiller.Work(*workers->front().reader, workers->front().slots);
  for (std::thread& thread : threads) thread.join();
  if (absl::Status status = refiller.status(); !status.ok()) return status;
  RefillReport report = refiller.report();
  report.engine = options.engine;
  return report;
}

absl::StatusOr<RefillReport> Refill(std::span<const SourceFile> files, std::span<const ReadPiece> pieces,
                                    const RefillOptions& options, const RefillCallbacks& callbacks) {
  if (options.engine != ReadEngine::kThreads) {
    RefillOptions uring = options;
    uring.engine = ReadEngine::kUring;
    absl::StatusOr<RefillReport> report = RefillThrough(files, pieces, uring, callbacks, MakeUringReader);
    // Readers are made before the first read, so nothing has been told to the caller yet.
    if (options.engine == ReadEngine::kUring || ReasonOf(report.status()) != "NO_URING") return report;
  }
  RefillOptions threads = options;
  threads.engine = ReadEngine::kThreads;
  threads.workers = options.queue_depth;
  return RefillThrough(files, pieces, threads, callbacks, MakePreadReader);
}

}  // namespace residency
