// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/file_parts.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/base/internal/raw_logging.h"

namespace residency {
namespace {

// Linux has no smaller pages on x86-64.
constexpr uint64_t kPageBytes = 4096;
// Locking so much more takes 50 us, about as long as another call does.
constexpr uint64_t kGapBytes = 2 * kMiB;

uint64_t PageBegin(uint64_t offset) { return offset & ~(kPageBytes - 1); }

struct Run {
  uint32_t file = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The piece that holds the byte at `offset` of `file`.
const FilePiece& PieceAt(std::span<const FilePiece> pieces, uint32_t file, uint64_t offset) {
  const auto after =
      std::upper_bound(pieces.begin(), pieces.end(), std::pair(file, offset),
                       [](const auto& at, const FilePiece& piece) { return at < std::pair(piece.file, piece.offset); });
  ABSL_RAW_CHECK(after != pieces.begin(), "a tensor lies in no piece");
  const FilePiece& piece = *std::prev(after);
  ABSL_RAW_CHECK(piece.file == file && offset - piece.offset < piece.bytes, "a tensor lies in no piece");
  return piece;
}

// The parts of a cell with zeros for what `parts`, which are in order, leave out of its bytes.
std::vector<CellPart> WithZeros(const std::vector<CellPart>& parts, uint64_t cell_bytes) {
  std::vector<CellPart> all;
  uint64_t covered = 0;
  const auto reach = [&](uint64_t offset) {
    if (covered < offset) all.push_back({.offset = covered, .bytes = offset - covered});
  };
  for (const CellPart& part : parts) {
    reach(part.offset);
    all.push_back(part);
    covered = part.offset + part.bytes;
  }
  reach(cell_bytes);
  return all;
}

}  // namespace

std::vector<FilePiece> FilePieces(const Manifest& manifest, uint64_t piece_bytes) {
  std::vector<Run> runs;
  for (const ManifestComponent& component : manifest.components) {
    for (const ManifestTensor& tensor : component.tensors) {
      if (tensor.bytes == 0) continue;
      runs.push_back(
          {tensor.file, PageBegin(tensor.file_offset), AlignUp(tensor.file_offset + tensor.bytes, kPageBytes)});
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return std::pair(a.file, a.begin) < std::pair(b.file, b.begin); });
  std::vector<FilePiece> pieces;
  for (size_t i = 0; i < runs.size();) {
    Run run = runs[i++];
    while (i < runs.size() && runs[i].file == run.file && runs[i].begin <= run.end + kGapBytes) {
      run.end = std::max(run.end, runs[i++].end);
    }
    for (uint64_t at = run.begin; at < run.end; at += piece_bytes) {
      pieces.push_back({run.file, at, std::min(piece_bytes, run.end - at)});
    }
  }
  return pieces;
}

uint64_t BytesOf(std::span<const FilePiece> pieces) {
  uint64_t sum = 0;
  for (const FilePiece& piece : pieces) sum += piece.bytes;
  return sum;
}

std::vector<std::vector<CellPart>> FileParts(const Layout& layout, uint32_t component_index, const Manifest& manifest,
                                             std::span<const FilePiece> pieces,
                                             std::span<const std::byte* const> files) {
  const LayoutComponent& component = layout.components[component_index];
  const std::vector<ManifestTensor>& tensors = manifest.components[component_index].tensors;
  ABSL_RAW_CHECK(tensors.size() == component.tensors.size(), "layout and manifest are of different models");
  std::vector<std::vector<CellPart>> cells(component.cell_count);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ManifestTensor& tensor = tensors[i];
    const uint64_t begin = component.tensors[i].device_offset - component.device_offset;
    for (uint64_t done = 0; done < tensor.bytes;) {
      const uint64_t place = begin + done;
      const uint64_t at = tensor.file_offset + done;
      std::vector<CellPart>& parts = cells[place / layout.cell_bytes];
      const uint64_t offset = place % layout.cell_bytes;
      const FilePiece& piece = PieceAt(pieces, tensor.file, at);
      const uint64_t bytes =
          std::min({tensor.bytes - done, layout.cell_bytes - offset, piece.bytes - (at - piece.offset)});
      const std::byte* data = files[tensor.file] + at;
      // At a piece's begin, what lies before it in memory is another piece, or another file that happens to be there.
      const bool follows = at > piece.offset && !parts.empty() && parts.back().offset + parts.back().bytes == offset &&
                           parts.back().data + parts.back().bytes == data;
      if (follows) {
        parts.back().bytes += bytes;
      } else {
        parts.push_back({.offset = offset, .bytes = bytes, .data = data});
      }
      done += bytes;
    }
  }
  for (uint32_t i = 0; i < component.cell_count; ++i) {
    cells[i] = WithZeros(cells[i], layout.cells[component.first_cell + i].bytes);
  }
  return cells;
}

}  // namespace residency
