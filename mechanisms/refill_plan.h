// SPDX-License-Identifier: Apache-2.0
//
// Cuts the wanted ranges of files into page-aligned blocks. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_REFILL_PLAN_H_
#define RESIDENCY_MECHANISMS_REFILL_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "mechanisms/refill.h"

namespace residency {

// One read. Blocks do not overlap, are sorted by file and offset, and hold every byte of every piece; pages without a
// wanted byte are in none.
struct ReadBlock {
  uint32_t file = 0;
  uint64_t file_offset = 0;   // a multiple of kReadAlignment
  uint64_t bytes = 0;         // likewise; may reach past the end of the file
  uint64_t needed_bytes = 0;  // from file_offset to the last wanted byte in the block
  // Of the pieces, those that may have bytes in this block; each is still to be asked.
  uint32_t first_piece = 0;
  uint32_t end_piece = 0;
};

// `pieces` as Refill takes them, checked; `block_bytes` is a multiple of kReadAlignment.
std::vector<ReadBlock> PlanBlocks(std::span<const ReadPiece> pieces, uint64_t block_bytes);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_REFILL_PLAN_H_
