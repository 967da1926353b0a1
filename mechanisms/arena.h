// SPDX-License-Identifier: Apache-2.0
//
// A model's span of device addresses and the cells under it. The addresses are reserved once and stay for
// the arena's life; Realize changes which of them have memory. Activation is Realize of a plan whose cells
// are resident, deactivation Realize of one whose cells are absent; the latter copies nothing.
//
// Threads: one device loop calls everything but Measure, which any thread may call at any time.
//
// Invariants:
//  1. After a Realize that succeeded, the footprint that the driver reports equals Price(plan) to the byte,
//     and every cell that it brought holds its source's bytes, as digested on the device unless the caller said no.
//  2. After a Realize that failed, the plan before it is realized again and all of its cells verified, also
//     those that never left; if that fails too the arena is broken and takes no further Realize but that of no
//     cell at all.
//  3. Nothing is unmapped under a copy or a kernel that may still run.
//  4. No device memory is created or released while cells are being filled: it is scrubbed on the copy engines.
#ifndef RESIDENCY_MECHANISMS_ARENA_H_
#define RESIDENCY_MECHANISMS_ARENA_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <stop_token>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/cell_pool.h"
#include "mechanisms/copy_queue.h"
#include "mechanisms/device.h"
#include "mechanisms/digester.h"
#include "mechanisms/held_cells.h"
#include "mechanisms/layout.h"
#include "mechanisms/plan.h"
#include "mechanisms/source.h"

namespace residency {

// What the driver answered, cell by cell; never what somebody promised.
struct Footprint {
  struct Component {
    uint32_t cells_on_gpu = 0;
    uint64_t device_bytes = 0;
  };
  std::vector<Component> components;  // as in the layout
  uint64_t device_bytes = 0;
  absl::Status status;  // not OK: the driver gave no answer for a cell, which is then not counted
};

struct RealizeReport {
  uint64_t copied_bytes = 0;  // host to device
  uint64_t verified_cells = 0;
  uint64_t trusted_cells = 0;  // not verified: their source had no digest yet, and has the device's now
  uint64_t refilled_cells = 0;
  uint64_t unmapped_bytes = 0;  // went to the pool
  uint64_t device_bytes = 0;    // what the driver shows under the span now
};

struct ArenaOptions {
  // Cells are mapped about this far ahead of their copies: enough that the copy engine never waits for the page tables,
  // while mapping everything first costs 3 to 5 % (155.5 against 164 ms for 8 GiB on an H200).
  uint64_t map_ahead_bytes = 64 * kMiB;
  // Bytes that one launch digests. What the last launch takes comes on top of the copies (32 us for this many at
  // 4 TB/s), and a launch waits up to 2.4 ms behind a client that keeps the GPU busy, while this many bytes take that
  // long to come. On an idle H200 64 to 512 MiB are alike, 2 GiB cost 0.4 ms more (tests/bench/results).
  uint64_t digest_batch_bytes = 128 * kMiB;
  CopyPieces pieces;
  // Cells that RealizeOptions::filled is told of at once, at least. Each telling is a packet to every client, which
  // maps eight cells of 64 MiB in half a millisecond, while they take nine to come (H200).
  size_t filled_cells_at_once = 8;
};

class Arena;

struct RealizeOptions {
  // Whether what comes is digested on the device and compared with its source's digests. Where the source has none yet
  // it is digested all the same.
  bool verify = true;
  // When requested while cells are being filled: CANCELLED/CANCELLED. What is under way is waited for, at most
  // CopyQueue::kPiecesUnderWay pieces.
  std::stop_token stop;
  // Arenas of the same device that are to be emptied, which nobody uses any more: their cells are taken off as they are
  // needed and clients have let them go (see Arena::set_held), and the rest of them while the last bytes flow. After a
  // failure it is the caller's to empty each, or to Return it.
  std::span<Arena* const> givers;
  // Told of cells that have come and are wholly overwritten, a few at a time, while others are still on their way; not
  // of the last ones. They are not verified yet, and may leave again. On the device loop; may be empty.
  std::function<void(std::span<const uint32_t> cells)> filled;
};

struct VerifyReport {
  uint64_t verified_cells = 0;
  uint64_t refilled_cells = 0;
  uint64_t absent_cells = 0;
};

class Arena {
 public:
  // Reserves the span. All of the arguments must outlive the arena.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const Device& device, CellPool& pool, Digester& digester,
                                                       const Layout& layout, const ArenaOptions& options = {});
  // Unmaps what is mapped; the cells go to the pool.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Makes the device hold what `plan` says; `sources` has one entry for each component. Windowed cells have
  // no memory here: windows belong to leases.
  // RESOURCE_EXHAUSTED/GPU_MEMORY: the device had no room after all; DATA_LOSS/VERIFY: a cell did not match
  // its source's digest, nor after a refill; FAILED_PRECONDITION/BROKEN; UNAVAILABLE/DEVICE_LOST; CANCELLED/CANCELLED;
  // what Source::CheckUnchanged answers, before cells come or after; why Source::AwaitCell or AwaitEnd give up.
  absl::StatusOr<RealizeReport> Realize(const Plan& plan, std::span<const Source* const> sources,
                                        const RealizeOptions& options = {});

  // For a giver: which of its cells clients have still, which are not taken off before they have let them go. It
  // outlives the Realize of the other arena; nullptr: none.
  void set_held(const HeldCells* held) { held_ = held; }
  // Takes off what a Realize of others has left of this giver; no client may have any of it. On failure the caller
  // decides between Return and Break.
  absl::Status Empty();
  // Realizes a plan of before again, and verifies all of it; the arena is broken where that fails, or is given up.
  absl::Status Return(const Plan& before, std::span<const Source* const> sources, std::stop_token stop = {});
  // For one that can neither be emptied nor be whole again.
  void Break() { broken_ = true; }

  // Digests every resident cell on the device and compares it with its source; a wrong one is refilled.
  // DATA_LOSS/VERIFY: a refill did not help; the arena is broken after that, also where what Source::CheckUnchanged
  // answers explains why it did not. Any other error that comes when a cell
  // has been found wrong already is answered by verifying and refilling once more, and where that fails too the arena
  // is broken; the first error is reported either way.
  absl::StatusOr<VerifyReport> Verify(std::span<const Source* const> sources);

  // Asks the driver about each cell.
  Footprint Measure() const;

  // The cells that have memory, in rising order.
  std::vector<uint32_t> MappedCells() const;
  // Those resident, the others absent.
  Plan CurrentPlan() const;

  // A descriptor for a resident cell, borrowed; exported at the first call. Valid until the cell leaves
  // the arena.
  absl::StatusOr<int> Descriptor(uint32_t cell);

  CUdeviceptr address() const { return span_.get(); }
  bool broken() const { return broken_; }

 private:
  Arena(const Device& device, CellPool& pool, Digester& digester, const Layout& layout, const ArenaOptions& options,
        AddressRange span, Stream stream)
      : device_(device),
        pool_(pool),
        digester_(digester),
        layout_(layout),
        options_(options),
        span_(std::move(span)),
        stream_(std::move(stream)) {}

  // Whether somebody may be reading a cell while it is filled.
  enum class Readers { kNone, kPerhaps };

  CUdeviceptr AddressOf(uint32_t cell) const { return span_.get() + layout_.cells[cell].device_offset; }
  absl::Status Apply(const Plan& plan, std::span<const Source* const> sources, const RealizeOptions& options,
                     RealizeReport& report);
  absl::Status Undo(const Plan& before, std::span<const Source* const> sources, std::stop_token stop = {});
  absl::Status Mend(std::span<const Source* const> sources);
  absl::Status Settle();
  absl::Status Remove(const std::vector<uint32_t>& cells, RealizeReport& report);
  absl::Status Add(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                   const RealizeOptions& wished, RealizeReport& report);
  absl::Status Stock(const std::vector<uint32_t>& cells, const RealizeOptions& options);
  absl::Status Enqueue(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                       const RealizeOptions& options, RealizeReport& report);
  absl::Status GiveRest(const RealizeOptions& options);
  absl::Status Give(uint64_t bytes, const std::stop_token& stop);
  absl::Status AwaitLetGo(uint32_t cell, const std::stop_token& stop) const;
  absl::StatusOr<Cell> TakeCell(uint64_t bytes, const RealizeOptions& options);
  absl::Status MapCell(uint32_t cell, const RealizeOptions& options);
  absl::Status OpenCell(uint32_t cell);
  absl::StatusOr<uint64_t> CopyCell(uint32_t cell, std::span<const Source* const> sources, Readers readers,
                                    CopyQueue& copies);
  std::set<uint32_t> ComponentsOf(const std::vector<uint32_t>& cells) const;
  absl::Status CheckSources(const std::vector<uint32_t>& cells, std::span<const Source* const> sources) const;
  absl::Status AwaitSources(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                            const std::stop_token& stop) const;
  uint64_t CountUndigested(const std::vector<uint32_t>& cells, std::span<const Source* const> sources) const;
  absl::Status Refill(const std::vector<uint32_t>& wrong, std::span<const Source* const> sources);
  std::vector<DigestItem> ItemsOf(const std::vector<uint32_t>& cells) const;
  std::vector<uint32_t> WrongOf(const std::vector<uint32_t>& cells, const std::vector<uint64_t>& digests,
                                std::span<const Source* const> sources) const;
  absl::StatusOr<std::vector<uint32_t>> FindWrong(const std::vector<uint32_t>& cells,
                                                  std::span<const Source* const> sources);

  const Device& device_;
  CellPool& pool_;
  Digester& digester_;
  const Layout& layout_;
  const ArenaOptions options_;
  AddressRange span_;
  Stream stream_;
  std::map<uint32_t, Cell> mapped_;  // the cells that lie under the span, by index
  std::set<uint32_t> unopened_;  // those of them that the device may not touch: opening failed, and so did unmapping
  const HeldCells* held_ = nullptr;
  bool busy_ = false;  // copies to, or digests of, cells may still be under way
  bool broken_ = false;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_ARENA_H_
