// SPDX-License-Identifier: Apache-2.0
//
// Cuts the image of a component into the pieces that are page-locked by one call each, and tells when all bytes of a
// piece have come. A piece is whole cells, so that no copy of a cell crosses two.
#ifndef RESIDENCY_MECHANISMS_PIN_PIECES_H_
#define RESIDENCY_MECHANISMS_PIN_PIECES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "mechanisms/layout.h"
#include "mechanisms/units.h"

namespace residency {

// Most bytes that are page-locked by one call, so that a driver's limit on one registration is never met and a
// failure gives back in steps. A cell has at most that many.
inline constexpr uint64_t kPinPieceBytes = 256 * kMiB;
static_assert(kMaxCellBytes <= kPinPieceBytes);

class PinPieces {
 public:
  using Complete = std::function<void(uint64_t offset, uint64_t bytes)>;

  // Of a component of `layout`. `complete` is called once for each piece, on the thread that brings its last byte; for
  // those without a byte of a tensor here.
  PinPieces(const Layout& layout, uint32_t component_index, Complete complete);

  // Bytes of a tensor have come to lie at `offset` of the image. Every byte comes once. Any thread, several at once;
  // what they wrote is seen by whoever hears that the piece is complete.
  void Add(uint64_t offset, uint64_t bytes);

 private:
  // Calls `visit(piece, bytes)` with what each piece has of a range.
  template <typename Visit>
  void ForEach(uint64_t offset, uint64_t bytes, Visit visit);

  const Complete complete_;
  std::vector<uint64_t> ends_;                        // of the pieces, in the image
  std::vector<std::atomic<uint64_t>> missing_bytes_;  // of each, that are still to come
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_PIN_PIECES_H_
