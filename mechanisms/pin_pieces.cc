// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/pin_pieces.h"

#include <algorithm>
#include <utility>

namespace residency {
namespace {

std::vector<uint64_t> EndsOf(const Layout& layout, const LayoutComponent& component) {
  std::vector<uint64_t> ends;
  uint64_t begin = 0;
  uint64_t end = 0;
  for (uint32_t i = 0; i < component.cell_count; ++i) {
    const uint64_t cell_bytes = layout.cells[component.first_cell + i].bytes;
    if (end - begin + cell_bytes > kPinPieceBytes) {
      ends.push_back(end);
      begin = end;
    }
    end += cell_bytes;
  }
  if (end > begin) ends.push_back(end);
  return ends;
}

}  // namespace

PinPieces::PinPieces(const Layout& layout, uint32_t component_index, Complete complete)
    : complete_(std::move(complete)),
      ends_(EndsOf(layout, layout.components[component_index])),
      missing_bytes_(ends_.size()) {
  const LayoutComponent& component = layout.components[component_index];
  for (const LayoutTensor& tensor : component.tensors) {
    ForEach(tensor.device_offset - component.device_offset, tensor.bytes,
            [this](size_t piece, uint64_t bytes) { missing_bytes_[piece] += bytes; });
  }
  for (size_t piece = 0; piece < ends_.size(); ++piece) {
    const uint64_t begin = piece == 0 ? 0 : ends_[piece - 1];
    if (missing_bytes_[piece] == 0) complete_(begin, ends_[piece] - begin);
  }
}

template <typename Visit>
void PinPieces::ForEach(uint64_t offset, uint64_t bytes, Visit visit) {
  size_t piece = std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin();
  while (bytes > 0) {
    const uint64_t part = std::min(bytes, ends_[piece] - offset);
    visit(piece++, part);
    offset += part;
    bytes -= part;
  }
}

void PinPieces::Add(uint64_t offset, uint64_t bytes) {
  ForEach(offset, bytes, [this](size_t piece, uint64_t part) {
    if (missing_bytes_[piece].fetch_sub(part, std::memory_order_acq_rel) != part) return;
    const uint64_t begin = piece == 0 ? 0 : ends_[piece - 1];
    complete_(begin, ends_[piece] - begin);
  });
}

}  // namespace residency
