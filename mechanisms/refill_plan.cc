// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refill_plan.h"

#include <algorithm>

namespace residency {
namespace {

uint64_t AlignDown(uint64_t value) { return value & ~(kReadAlignment - 1); }

// Pieces whose pages touch, and the range of the file from the first to the last wanted byte.
struct Extent {
  uint32_t first_piece;
  uint32_t end_piece;
  uint64_t begin;  // on a page
  uint64_t end;
};

Extent TakeExtent(std::span<const ReadPiece> pieces, uint32_t first) {
  Extent extent = {first, first + 1, AlignDown(pieces[first].file_offset),
                   pieces[first].file_offset + pieces[first].bytes};
  for (; extent.end_piece < pieces.size(); ++extent.end_piece) {
    const ReadPiece& next = pieces[extent.end_piece];
    if (next.file != pieces[first].file) break;
    if (next.bytes == 0) continue;
    if (AlignDown(next.file_offset) > AlignUp(extent.end, kReadAlignment)) break;
    extent.end = std::max(extent.end, next.file_offset + next.bytes);
  }
  return extent;
}

void CutExtent(std::span<const ReadPiece> pieces, const Extent& extent, uint64_t block_bytes,
               std::vector<ReadBlock>& blocks) {
  uint32_t first = extent.first_piece;
  uint32_t end = extent.first_piece;
  for (uint64_t begin = extent.begin; begin < extent.end; begin += block_bytes) {
    const uint64_t needed = std::min(block_bytes, extent.end - begin);
    while (first < extent.end_piece && pieces[first].file_offset + pieces[first].bytes <= begin) ++first;
    while (end < extent.end_piece && pieces[end].file_offset < begin + needed) ++end;
    blocks.push_back({.file = pieces[extent.first_piece].file,
                      .file_offset = begin,
                      .bytes = AlignUp(needed, kReadAlignment),
                      .needed_bytes = needed,
                      .first_piece = first,
                      .end_piece = end});
  }
}

}  // namespace

std::vector<ReadBlock> PlanBlocks(std::span<const ReadPiece> pieces, uint64_t block_bytes) {
  std::vector<ReadBlock> blocks;
  for (uint32_t piece = 0; piece < pieces.size();) {
    if (pieces[piece].bytes == 0) {
      ++piece;
      continue;
    }
    const Extent extent = TakeExtent(pieces, piece);
    CutExtent(pieces, extent, block_bytes, blocks);
    piece = extent.end_piece;
  }
  return blocks;
}

}  // namespace residency
