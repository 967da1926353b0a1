// SPDX-License-Identifier: Apache-2.0
//
// A layout says where every tensor of a model lies in the model's span of device addresses, and how the
// span is cut into cells. Pure: same inputs, same layout, byte for byte, in the daemon and in every
// client. Any thread.
//
// Invariants of a Layout that MakeLayout returned:
//  1. Tensors keep their order, start on multiples of kTensorAlignment and do not overlap.
//  2. A component starts on a cell of its own, at a multiple of the granule.
//  3. The cells of a component tile its span: all have cell_bytes but the last, which is cut to what the
//     span needs, rounded up to the granule. A tensor may lie across a cell's end.
//  4. span_bytes is the sum of all cells' bytes: what a fully resident model costs, to the byte.
#ifndef RESIDENCY_MECHANISMS_LAYOUT_H_
#define RESIDENCY_MECHANISMS_LAYOUT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/dtype.h"
#include "mechanisms/units.h"

namespace residency {

// cudaMalloc promises 256 bytes, so kernels written for it may assume them.
inline constexpr uint64_t kTensorAlignment = 256;
inline constexpr uint64_t kDefaultCellBytes = 64 * kMiB;
inline constexpr uint64_t kMinCellBytes = 2 * kMiB;
inline constexpr uint64_t kMaxCellBytes = 256 * kMiB;
// The granularity of cuMemCreate on every GPU we know of; Device says what it is on the one at hand.
inline constexpr uint64_t kDefaultGranuleBytes = 2 * kMiB;
// 64 TiB of default cells. A sparse file may claim any size, so the table of cells needs a bound.
inline constexpr uint32_t kMaxCells = uint32_t{1} << 20;

struct LayoutTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
  uint64_t device_offset = 0;  // from the start of the span; MakeLayout fills it in
};

struct LayoutComponent {
  std::string name;
  std::vector<LayoutTensor> tensors;  // in file order
  // Filled in by MakeLayout:
  uint64_t device_offset = 0;
  uint64_t span_bytes = 0;     // a multiple of the granule
  uint64_t payload_bytes = 0;  // the sum of its tensors' bytes
  uint32_t first_cell = 0;
  uint32_t cell_count = 0;
};

struct LayoutCell {
  uint64_t device_offset = 0;
  uint64_t bytes = 0;
  uint32_t component = 0;  // index into Layout::components
};

struct Layout {
  uint64_t cell_bytes = 0;
  uint64_t granule_bytes = 0;
  uint64_t span_bytes = 0;
  uint64_t payload_bytes = 0;
  std::vector<LayoutComponent> components;
  std::vector<LayoutCell> cells;
  uint64_t digest = 0;  // of all of the above; daemon and client compare it

  uint64_t tax_bytes() const { return span_bytes - payload_bytes; }
};

// Lays `components` out. `cell_bytes` is a power of two from kMinCellBytes to kMaxCellBytes and a
// multiple of `granule_bytes`, which is a power of two and a multiple of kTensorAlignment. The given
// device_offsets are ignored. A component without bytes has no cells.
// INVALID_ARGUMENT: BAD_CELL_BYTES for those two, TOO_LARGE where the span passes 2^62 bytes or
// kMaxCells cells.
absl::StatusOr<Layout> MakeLayout(std::vector<LayoutComponent> components, uint64_t cell_bytes, uint64_t granule_bytes);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_LAYOUT_H_
