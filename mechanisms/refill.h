// SPDX-License-Identifier: Apache-2.0
//
// Refill reads ranges of model files into memory: by io_uring, or by threads that call pread where the system
// refuses io_uring; past the page cache (O_DIRECT) where the file system can, since a model file is read once and
// would push out what others need. File data starts at any offset and direct reads want whole pages, so workers read
// page-aligned blocks into staging buffers, copy the wanted bytes from there, and tell the caller while the copy is
// still in the processor's cache.
//
// A model file is never mapped to be read: a mapped file that somebody truncates kills its reader by SIGBUS.
//
// Blocking; called on a worker, never on a loop. Any thread; calls share nothing.
#ifndef RESIDENCY_MECHANISMS_REFILL_H_
#define RESIDENCY_MECHANISMS_REFILL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/manifest.h"
#include "mechanisms/refill_reader.h"
#include "mechanisms/units.h"

namespace residency {

// A range of a file and the memory that it goes to, which the caller keeps writable during the call.
struct ReadPiece {
  uint32_t file = 0;  // index into the files
  uint64_t file_offset = 0;
  uint64_t bytes = 0;
  std::byte* destination = nullptr;
};

enum class ReadEngine {
  kAuto,     // io_uring, or threads where the system refuses it
  kUring,    // UNAVAILABLE/NO_URING where the system refuses it
  kThreads,  // pread
};

struct RefillOptions {
  ReadEngine engine = ReadEngine::kAuto;
  // Whether to try O_DIRECT; a file whose file system refuses it is read through the page cache.
  bool direct = true;
  // Bytes of a read, a multiple of kReadAlignment. From 1 MiB up disks reach their rate; larger ones cost staging.
  uint64_t block_bytes = 4 * kMiB;
  // Reads under way at a time, and staging buffers: four for each worker, so that the disk has some to do while it
  // copies. Not seen to matter much: 4 GiB from the disk of an H200's host took 3.2 s with 8 and four workers, 2.8 s
  // with these, where the disk itself took from 3.1 to 3.9 s (medians of 3, tests/bench/results).
  uint32_t queue_depth = 32;
  // Threads that copy, of which the caller's is one. One thread copies into fresh pages at 1 to 3 GB/s, less than a
  // disk gives. Reading by pread takes as many as queue_depth instead.
  uint32_t workers = 8;
};

struct RefillCallbacks {
  // `bytes` of a piece are about to be copied to `destination`; an error ends the refill and is its answer. Called on
  // several workers at once, once for each call of `copied`. May be empty.
  std::function<absl::Status(std::byte* destination, uint64_t bytes)> prepare;
  // `bytes` of a piece have come to lie at `destination`. Called on several workers at once; the calls come in any
  // order and tile every piece. May be empty.
  std::function<void(std::byte* destination, uint64_t bytes)> copied;
  // How many bytes of all pieces are there; false cancels. Called on any worker, one at a time, with rising values,
  // and after the last byte. May be empty.
  std::function<bool(uint64_t done_bytes)> progress;
};

// What a refill did.
struct RefillReport {
  ReadEngine engine = ReadEngine::kAuto;  // the one used, never kAuto
  uint64_t read_bytes = 0;                // from files, page-aligned
  uint32_t direct_files = 0;              // read past the page cache to the end
  uint32_t buffered_files = 0;
};

// Fills every piece. `pieces` are sorted by file, then by offset, and may overlap in the file (several tensors may
// share bytes). Files without a piece, or with empty pieces only, are not opened. When it fails, what the
// destinations hold is undefined; no read is under way any more.
//
//  NOT_FOUND/FILE_MISSING a file is not there any more;
//  FAILED_PRECONDITION/FILE_CHANGED a file is not, or after reading no longer, the one in `files`;
//  DATA_LOSS/FILE_TRUNCATED a file ended early; DATA_LOSS/READ_ERROR it could not be read;
//  CANCELLED/CANCELLED progress said so; UNAVAILABLE/NO_URING as above;
//  UNREADABLE, with the code that ErrnoStatus gives, a file cannot be opened;
//  RESOURCE_EXHAUSTED no memory for staging, no descriptor;
//  INVALID_ARGUMENT/BAD_PIECES pieces out of order or out of their file, or options that make no sense.
absl::StatusOr<RefillReport> Refill(std::span<const SourceFile> files, std::span<const ReadPiece> pieces,
                                    const RefillOptions& options, const RefillCallbacks& callbacks);

// The same through readers that `make_reader` makes, one for each worker; options.engine is only reported.
absl::StatusOr<RefillReport> RefillThrough(std::span<const SourceFile> files, std::span<const ReadPiece> pieces,
                                           const RefillOptions& options, const RefillCallbacks& callbacks,
                                           const BlockReaderFactory& make_reader);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_REFILL_H_
