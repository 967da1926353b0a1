// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of cells come from, as the arena sees it: host memory that a copy to the device may read. A mirror
// is one. Immutable once made; any thread.
#ifndef RESIDENCY_MECHANISMS_SOURCE_H_
#define RESIDENCY_MECHANISMS_SOURCE_H_

#include <cstddef>
#include <cstdint>

namespace residency {

// Cells are numbered as in the whole layout. To ask for a cell of a component that the source does not hold is a
// mistake of the caller (CHECK).
class Source {
 public:
  virtual ~Source() = default;

  // All of the cell's bytes (LayoutCell::bytes), padding included; valid as long as the source. A cell never lies
  // across two page-locked pieces, while two cells that follow each other may: a copy carries one cell.
  virtual const std::byte* CellData(uint32_t cell) const = 0;

  // DigestWords over those bytes.
  virtual uint64_t CellDigest(uint32_t cell) const = 0;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SOURCE_H_
