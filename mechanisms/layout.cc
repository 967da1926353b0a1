// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/layout.h"

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Far enough below 2^64 that no sum and no rounding up here can wrap.
constexpr uint64_t kMaxSpanBytes = uint64_t{1} << 62;

// FNV-1a, 64 bits: the constants are the published ones (Fowler, Noll, Vo). It must be the same in every
// process and build, which rules out absl::Hash, whose seed differs by process. It tells mistakes apart
// and is no defence against somebody who forges a layout.
class Fnv1a {
 public:
  void Integer(uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) Byte(static_cast<unsigned char>(value >> shift));
  }
  // Behind its length, so that "ab","c" and "a","bc" differ.
  void Text(std::string_view text) {
    Integer(text.size());
    for (const char c : text) Byte(static_cast<unsigned char>(c));
  }
  uint64_t value() const { return value_; }

 private:
  void Byte(unsigned char byte) { value_ = (value_ ^ byte) * 0x100000001b3; }

  uint64_t value_ = 0xcbf29ce484222325;
};

uint64_t DigestOf(const Layout& layout) {
  Fnv1a hash;
  hash.Integer(layout.cell_bytes);
  hash.Integer(layout.granule_bytes);
  hash.Integer(layout.span_bytes);
  hash.Integer(layout.payload_bytes);
  hash.Integer(layout.components.size());
  for (const LayoutComponent& component : layout.components) {
    hash.Text(component.name);
    hash.Integer(component.device_offset);
    hash.Integer(component.span_bytes);
    hash.Integer(component.payload_bytes);
    hash.Integer(component.first_cell);
    hash.Integer(component.cell_count);
    hash.Integer(component.tensors.size());
    for (const LayoutTensor& tensor : component.tensors) {
      hash.Text(tensor.name);
      hash.Text(DTypeName(tensor.dtype));
      hash.Integer(tensor.shape.size());
      for (const uint64_t dimension : tensor.shape) hash.Integer(dimension);
      hash.Integer(tensor.bytes);
      hash.Integer(tensor.device_offset);
    }
  }
  hash.Integer(layout.cells.size());
  for (const LayoutCell& cell : layout.cells) {
    hash.Integer(cell.device_offset);
    hash.Integer(cell.bytes);
    hash.Integer(cell.component);
  }
  return hash.value();
}

absl::Status CheckCellBytes(uint64_t cell_bytes, uint64_t granule_bytes) {
  const bool granule_is_good = std::has_single_bit(granule_bytes) && granule_bytes >= kTensorAlignment;
  const bool cell_is_good = std::has_single_bit(cell_bytes) && cell_bytes >= kMinCellBytes &&
                            cell_bytes <= kMaxCellBytes && cell_bytes >= granule_bytes;
  if (granule_is_good && cell_is_good) return absl::OkStatus();
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_CELL_BYTES",
                absl::StrCat("cells of ", cell_bytes, " bytes with a granule of ", granule_bytes,
                             " bytes: a cell is a power of two from ", kMinCellBytes, " to ", kMaxCellBytes,
                             " bytes and a multiple of the granule, which is a power of two of at least ",
                             kTensorAlignment, " bytes"));
}

absl::Status TooLarge(const LayoutComponent& component, const std::string& tensor_name) {
  Refusal refusal;
  refusal.reason = "TOO_LARGE";
  refusal.tensor = tensor_name;
  return Refuse(absl::StatusCode::kInvalidArgument, std::move(refusal),
                absl::StrCat("component ", component.name, tensor_name.empty() ? "" : ", tensor ", tensor_name,
                             ": the model's span would pass ", kMaxSpanBytes, " bytes or ", kMaxCells, " cells"));
}

// Gives each tensor of `component`, which starts at component->device_offset, its place.
absl::Status PlaceTensors(LayoutComponent* component, uint64_t granule_bytes) {
  uint64_t end = component->device_offset;
  component->payload_bytes = 0;
  for (LayoutTensor& tensor : component->tensors) {
    tensor.device_offset = AlignUp(end, kTensorAlignment);
    if (tensor.bytes > kMaxSpanBytes || tensor.device_offset + tensor.bytes > kMaxSpanBytes) {
      return TooLarge(*component, tensor.name);
    }
    end = tensor.device_offset + tensor.bytes;
    component->payload_bytes += tensor.bytes;
  }
  component->span_bytes = AlignUp(end - component->device_offset, granule_bytes);
  return absl::OkStatus();
}

// Appends the cells that tile the span of the component at `index`.
absl::Status CutCells(Layout* layout, uint32_t index) {
  LayoutComponent& component = layout->components[index];
  const uint64_t cell_count =
      component.span_bytes / layout->cell_bytes + (component.span_bytes % layout->cell_bytes != 0);
  if (cell_count > kMaxCells - layout->cells.size()) return TooLarge(component, "");
  component.first_cell = static_cast<uint32_t>(layout->cells.size());
  component.cell_count = static_cast<uint32_t>(cell_count);
  uint64_t offset = 0;
  while (offset < component.span_bytes) {
    const uint64_t bytes = std::min(layout->cell_bytes, component.span_bytes - offset);
    layout->cells.push_back({component.device_offset + offset, bytes, index});
    offset += bytes;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Layout> MakeLayout(std::vector<LayoutComponent> components, uint64_t cell_bytes,
                                  uint64_t granule_bytes) {
  if (absl::Status status = CheckCellBytes(cell_bytes, granule_bytes); !status.ok()) return status;
  Layout layout;
  layout.cell_bytes = cell_bytes;
  layout.granule_bytes = granule_bytes;
  layout.components = std::move(components);
  for (uint32_t i = 0; i < layout.components.size(); ++i) {
    LayoutComponent& component = layout.components[i];
    component.device_offset = layout.span_bytes;
    if (absl::Status status = PlaceTensors(&component, granule_bytes); !status.ok()) return status;
    if (absl::Status status = CutCells(&layout, i); !status.ok()) return status;
    layout.span_bytes += component.span_bytes;
    layout.payload_bytes += component.payload_bytes;
  }
  layout.digest = DigestOf(layout);
  return layout;
}

}  // namespace residency
