// SPDX-License-Identifier: Apache-2.0
//
// How an arena brings cells: where their memory comes from, and how it is mapped and filled.
#include <algorithm>
#include <utility>

#include "mechanisms/arena.h"

namespace residency {

absl::Status Arena::Add(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                        const RealizeOptions& wished, RealizeReport& report) {
  if (cells.empty()) return GiveRest(wished);
  RealizeOptions options = wished;
  // What is known of no byte yet has to be learnt now, or there would be nothing to verify against later.
  const uint64_t trusted_cells = CountUndigested(cells, sources);
  options.verify |= trusted_cells > 0;
  if (options.stop.stop_requested()) return CopyQueue::Stopped();
  if (auto status = CheckSources(cells, sources); !status.ok()) return status;
  if (auto status = Stock(cells, options); !status.ok()) return status;
  busy_ = true;
  absl::Status status = options.verify ? digester_.Begin(ItemsOf(cells)) : absl::OkStatus();
  if (status.ok()) status = Enqueue(cells, sources, options, report);
  std::vector<uint64_t> digests;
  if (status.ok() && options.verify) {
    auto finished = digester_.Finish();
    status = finished.status();
    if (finished.ok()) digests = *std::move(finished);
  }
  // Whether or not it went well: no copy may be in flight when the caller changes the mapping or gives up.
  if (auto settled = Settle(); status.ok()) status = settled;
  if (status.ok()) status = AwaitSources(cells, sources, options.stop);
  if (!status.ok()) return status;
  if (options.verify) {
    const std::vector<uint32_t> wrong = WrongOf(cells, digests, sources);
    if (auto refilled = Refill(wrong, sources); !refilled.ok()) return refilled;
    report.verified_cells += cells.size() - trusted_cells;
    report.trusted_cells += trusted_cells;
    report.refilled_cells += wrong.size();
  }
  return CheckSources(cells, sources);
}

// Sees to it that the pool and the givers have a cell for each of `cells`.
absl::Status Arena::Stock(const std::vector<uint32_t>& cells, const RealizeOptions& options) {
  CellCounts missing;  // what the givers will not supply
  for (uint32_t cell : cells) ++missing[layout_.cells[cell].bytes];
  std::vector<std::pair<Arena*, uint32_t>> surplus;  // what the givers have beyond what is needed
  for (Arena* giver : options.givers) {
    for (const auto& [cell, memory] : giver->mapped_) {
      const auto size = missing.find(memory.memory.bytes());
      if (size != missing.end() && size->second > 0) {
        --size->second;
      } else {
        surplus.emplace_back(giver, cell);
      }
    }
  }
  // What is created takes the place of cells that nobody needs.
  const uint64_t create_bytes = pool_.MissingBytes(missing);
  // The last ones first, as clients let them go.
  std::reverse(surplus.begin(), surplus.end());
  for (const auto& [giver, cell] : surplus) {
    if (pool_.IdleBytesBeyond(missing) >= create_bytes) break;
    if (auto status = giver->AwaitLetGo(cell, options.stop); !status.ok()) return status;
    RealizeReport report;
    if (auto status = giver->Remove({cell}, report); !status.ok()) return status;
  }
  return pool_.Stock(missing);
}

namespace {

// Tells of cells whose last byte has arrived, `at_once` or more at a time.
class FilledCells {
 public:
  FilledCells(const CopyQueue& copies, size_t at_once, const std::function<void(std::span<const uint32_t>)>& tell)
      : copies_(copies), at_once_(at_once), tell_(tell) {}

  // All of the cell's bytes were added to the copies, the last of them just now.
  void Add(uint32_t cell) {
    if (!tell_) return;
    cells_.push_back(cell);
    ends_.push_back(copies_.added_bytes());
    while (arrived_ < ends_.size() && ends_[arrived_] <= copies_.arrived_bytes()) ++arrived_;
    if (arrived_ - told_ < at_once_) return;
    tell_(std::span<const uint32_t>(cells_).subspan(told_, arrived_ - told_));
    told_ = arrived_;
  }

 private:
  const CopyQueue& copies_;
  const size_t at_once_;
  const std::function<void(std::span<const uint32_t>)>& tell_;
  std::vector<uint32_t> cells_;
  std::vector<uint64_t> ends_;  // of each, in the copies
  size_t arrived_ = 0;
  size_t told_ = 0;
};

}  // namespace

// Maps and copies, and has digested what was copied, a batch at a time.
absl::Status Arena::Enqueue(const std::vector<uint32_t>& cells, std::span<const Source* const> sources,
                            const RealizeOptions& options, RealizeReport& report) {
  CopyQueue copies(device_, stream_, options.stop, options_.pieces);
  FilledCells filled(copies, options_.filled_cells_at_once, options.filled);
  size_t next_to_map = 0;
  uint64_t ahead_bytes = 0;
  size_t undigested = 0;
  uint64_t undigested_bytes = 0;
  for (size_t next_to_copy = 0; next_to_copy < cells.size(); ++next_to_copy) {
    while (next_to_map < cells.size() && (next_to_map <= next_to_copy || ahead_bytes < options_.map_ahead_bytes)) {
      if (auto status = MapCell(cells[next_to_map], options); !status.ok()) return status;
      ahead_bytes += layout_.cells[cells[next_to_map]].bytes;
      ++next_to_map;
    }
    const uint32_t cell = cells[next_to_copy];
    const auto copied_bytes = CopyCell(cell, sources, Readers::kNone, copies);
    if (!copied_bytes.ok()) return copied_bytes.status();
    ahead_bytes -= layout_.cells[cell].bytes;
    report.copied_bytes += *copied_bytes;
    // What only zeros were written to, arrives with no copy.
    if (*copied_bytes > 0) filled.Add(cell);
    undigested_bytes += layout_.cells[cell].bytes;
    const size_t copied = next_to_copy + 1;
    if (options.verify && (undigested_bytes >= options_.digest_batch_bytes || copied == cells.size())) {
      if (auto status = digester_.Launch(undigested, copied - undigested, stream_); !status.ok()) return status;
      undigested = copied;
      undigested_bytes = 0;
    }
  }
  // The last bytes are still on their way meanwhile.
  return GiveRest(options);
}

absl::Status Arena::GiveRest(const RealizeOptions& options) {
  for (Arena* giver : options.givers) {
    if (auto status = giver->Give(giver->layout_.span_bytes, options.stop); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Puts at least so many bytes of its cells into the pool, or all it has, waiting for clients that have them still. The
// last ones first, as clients let them go.
absl::Status Arena::Give(uint64_t bytes, const std::stop_token& stop) {
  for (uint64_t given_bytes = 0; given_bytes < bytes && !mapped_.empty();) {
    const uint64_t changes = held_ == nullptr ? 0 : held_->changes();
    std::vector<uint32_t> cells;
    for (auto cell = mapped_.rbegin(); cell != mapped_.rend() && given_bytes < bytes; ++cell) {
      if (held_ != nullptr && held_->IsHeld(cell->first)) continue;
      cells.push_back(cell->first);
      given_bytes += cell->second.memory.bytes();
    }
    if (cells.empty()) {
      if (!held_->AwaitChange(changes, stop)) return CopyQueue::Stopped();
      continue;
    }
    std::reverse(cells.begin(), cells.end());
    RealizeReport report;
    if (auto status = Remove(cells, report); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Arena::AwaitLetGo(uint32_t cell, const std::stop_token& stop) const {
  while (held_ != nullptr) {
    const uint64_t changes = held_->changes();
    if (!held_->IsHeld(cell)) break;
    if (!held_->AwaitChange(changes, stop)) return CopyQueue::Stopped();
  }
  return absl::OkStatus();
}

absl::StatusOr<Cell> Arena::TakeCell(uint64_t bytes, const RealizeOptions& options) {
  // Also where the pool has one: as much is taken off as comes on, so that no more is ever mapped than one of them has.
  bool gave = false;
  for (Arena* giver : options.givers) {
    while ((!gave || !pool_.HasIdle(bytes)) && !giver->mapped_.empty()) {
      if (auto status = giver->Give(bytes, options.stop); !status.ok()) return status;
      gave = true;
    }
  }
  return pool_.Take(bytes);
}

absl::Status Arena::MapCell(uint32_t cell, const RealizeOptions& options) {
  auto taken = TakeCell(layout_.cells[cell].bytes, options);
  if (!taken.ok()) return taken.status();
  const CUdeviceptr address = AddressOf(cell);
  const uint64_t bytes = taken->memory.bytes();
  absl::Status status = device_.Map(address, taken->memory);
  if (!status.ok()) {
    pool_.Put(*std::move(taken));
    return status;
  }
  status = OpenCell(cell);
  if (!status.ok() && device_.Unmap(address, bytes).ok()) {
    pool_.Put(*std::move(taken));
    return status;
  }
  // Also a cell that could be mapped, but neither opened nor unmapped, is under the span now, and is counted and
  // tried again as such.
  Cell& mapped = mapped_.emplace(cell, *std::move(taken)).first->second;
  if (!status.ok()) unopened_.insert(cell);
  // Ahead of the copies too, since the first time costs up to 0.65 ms. Whoever needs the descriptor hears of a refusal.
  if (status.ok() && options.filled) (void)pool_.Export(mapped);
  return status;
}

absl::Status Arena::OpenCell(uint32_t cell) {
  return device_.SetAccess(AddressOf(cell), layout_.cells[cell].bytes, Access::kReadWrite);
}

// Enqueues all that makes the cell's bytes; how many of them come from the host. Setting bytes is a launch, which waits
// where a client keeps the card busy, as copies do not: where nobody reads the cell, one call sets all zeros, and what
// lies between them, which the copies then overwrite.
absl::StatusOr<uint64_t> Arena::CopyCell(uint32_t cell, std::span<const Source* const> sources, Readers readers,
                                         CopyQueue& copies) {
  const Source& source = *sources[layout_.cells[cell].component];
  if (auto ready = source.AwaitCell(cell, copies.stop()); !ready.ok()) return ready;
  busy_ = true;
  uint64_t zeros_begin = layout_.cells[cell].bytes;
  uint64_t zeros_end = 0;
  absl::Status status = source.ForEachPart(cell, [&](const CellPart& part) -> absl::Status {
    if (part.data != nullptr) return absl::OkStatus();
    if (readers == Readers::kPerhaps) return device_.Zero(AddressOf(cell) + part.offset, part.bytes, stream_);
    zeros_begin = std::min(zeros_begin, part.offset);
    zeros_end = part.offset + part.bytes;
    return absl::OkStatus();
  });
  if (status.ok() && zeros_begin < zeros_end) {
    status = device_.Zero(AddressOf(cell) + zeros_begin, zeros_end - zeros_begin, stream_);
  }
  if (!status.ok()) return status;
  uint64_t copied_bytes = 0;
  status = source.ForEachPart(cell, [&](const CellPart& part) -> absl::Status {
    if (part.data == nullptr) return absl::OkStatus();
    copied_bytes += part.bytes;
    return copies.Add(AddressOf(cell) + part.offset, part.data, part.bytes);
  });
  if (!status.ok()) return status;
  return copied_bytes;
}

}  // namespace residency
