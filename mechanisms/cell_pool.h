// SPDX-License-Identifier: Apache-2.0
//
// Cells that exist and wait for the next model. Creating and releasing device memory scrubs it on the copy
// engines and halves a transfer beside it (55 to 28 GB/s on an H200), exporting costs up to 0.65 ms; so
// neither is done per activation. A cell is exported when its descriptor is first asked for, and the
// descriptor is kept with it.
//
// Threads: one device loop calls everything but idle_bytes(), which any thread may call.
#ifndef RESIDENCY_MECHANISMS_CELL_POOL_H_
#define RESIDENCY_MECHANISMS_CELL_POOL_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/device.h"
#include "mechanisms/unique_fd.h"

namespace residency {

struct Cell {
  CellMemory memory;
  UniqueFd descriptor;  // not valid until CellPool::Export
};

// How many cells of each size, by bytes.
using CellCounts = std::map<uint64_t, uint64_t>;

class CellPool {
 public:
  explicit CellPool(const Device& device) : device_(device) {}

  // A cell of exactly `bytes`: an idle one, else a new one, for which as many bytes of idle cells of other sizes go
  // back to the driver first, so that idle cells are as good as free memory to whoever counts. What an idle cell
  // holds is what its last model left there. RESOURCE_EXHAUSTED/GPU_MEMORY.
  absl::StatusOr<Cell> Take(uint64_t bytes);
  // Creates what is missing of `needed` idle cells, so that Take of them creates and releases nothing. As many bytes
  // go back to the driver first, as Take says, of idle cells beyond those needed. RESOURCE_EXHAUSTED/GPU_MEMORY: what
  // was created stays.
  absl::Status Stock(const CellCounts& needed);
  // The bytes that Stock would create.
  uint64_t MissingBytes(const CellCounts& needed) const;
  uint64_t IdleBytesBeyond(const CellCounts& kept) const;
  bool HasIdle(uint64_t bytes) const;
  // Keeps a cell that is mapped nowhere in this process.
  void Put(Cell cell);
  // Exports `cell` unless that was done before.
  absl::Status Export(Cell& cell) const;

  uint64_t idle_bytes() const { return idle_bytes_.load(std::memory_order_relaxed); }
  // Gives all idle cells back to the driver; the bytes given back.
  uint64_t Trim();

 private:
  void GiveBack(uint64_t bytes, const CellCounts& kept);

  const Device& device_;
  std::map<uint64_t, std::vector<Cell>> idle_;  // by bytes; the last one in is the first one out
  std::atomic<uint64_t> idle_bytes_{0};
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_CELL_POOL_H_
