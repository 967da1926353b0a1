// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/mirror.h"

#include "absl/base/internal/raw_logging.h"

namespace residency {

Mirror::Mirror(MirrorMemory memory, uint32_t first_cell, std::vector<Extent> cells,
               std::vector<HostRegistration> pinned)
    : memory_(std::move(memory)), first_cell_(first_cell), cells_(std::move(cells)), pinned_(std::move(pinned)) {}

Mirror& Mirror::operator=(Mirror&& other) noexcept {
  pinned_ = std::exchange(other.pinned_, {});
  memory_ = std::move(other.memory_);
  first_cell_ = other.first_cell_;
  cells_ = std::move(other.cells_);
  return *this;
}

uint64_t Mirror::pinned_bytes() const {
  uint64_t sum = 0;
  for (const HostRegistration& piece : pinned_) sum += piece.bytes();
  return sum;
}

const Mirror::Extent& Mirror::ExtentOf(uint32_t cell) const {
  ABSL_RAW_CHECK(cell >= first_cell_ && cell - first_cell_ < cells_.size(), "a cell of another component");
  return cells_[cell - first_cell_];
}

const std::byte* Mirror::CellData(uint32_t cell) const { return memory_.address() + ExtentOf(cell).offset; }

uint64_t Mirror::CellBytes(uint32_t cell) const { return ExtentOf(cell).bytes; }

uint64_t Mirror::CellDigest(uint32_t cell) const { return ExtentOf(cell).digest; }

}  // namespace residency
