// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of cells come from, as the arena sees it: host memory that a copy to the device may read. A mirror
// is one, laid out as the device is; files that are mapped where they lie are another. Any thread.
#ifndef RESIDENCY_MECHANISMS_SOURCE_H_
#define RESIDENCY_MECHANISMS_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <stop_token>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace residency {

// One write into a cell.
struct CellPart {
  uint64_t offset = 0;  // in the cell
  uint64_t bytes = 0;
  const std::byte* data = nullptr;  // valid as long as the source; null: zeros

  bool operator==(const CellPart&) const = default;
};

// Cells are numbered as in the whole layout. To ask for a cell of a component that the source does not hold is a
// mistake of the caller (CHECK).
class Source {
 public:
  using PartWriter = absl::FunctionRef<absl::Status(const CellPart&)>;

  virtual ~Source() = default;

  // Blocks until the cell's bytes are there to be copied; asked before they are. CANCELLED/CANCELLED: `stop` was
  // requested first; else why they will not come.
  virtual absl::Status AwaitCell(uint32_t cell, std::stop_token stop) const = 0;
  // Blocks until it is known of all bytes whether they are right, and Accept has something to compare with; asked
  // before what was copied counts. Errors as of AwaitCell.
  virtual absl::Status AwaitEnd(std::stop_token stop) const = 0;

  // Calls `write` with the parts that tile the cell (LayoutCell::bytes), padding included, in order; ends with the
  // first error. No part lies across two page-locked pieces.
  virtual absl::Status ForEachPart(uint32_t cell, PartWriter write) const = 0;

  // Whether `digest` is that of the cell's bytes (DigestWords over all of them), as a device computed it of what was
  // copied from here. A source that has none to compare with takes this one, for good once CheckUnchanged has been OK
  // after it.
  virtual bool Accept(uint32_t cell, uint64_t digest) const = 0;
  // Whether Accept compares: false until a source that has to be shown the digest was.
  virtual bool HasDigest(uint32_t cell) const = 0;

  // OK as long as what this reads is what it was when this was made. Asked before cells are copied from here and again
  // after that. May block as stat(2) does.
  virtual absl::Status CheckUnchanged() const = 0;
};

// A source that holds each cell as one range of memory which nobody changes, and its digest. Immutable once made.
class ImageSource : public Source {
 public:
  virtual const std::byte* CellData(uint32_t cell) const = 0;
  virtual uint64_t CellBytes(uint32_t cell) const = 0;
  virtual uint64_t CellDigest(uint32_t cell) const = 0;

  absl::Status AwaitCell(uint32_t, std::stop_token) const final { return absl::OkStatus(); }
  absl::Status AwaitEnd(std::stop_token) const final { return absl::OkStatus(); }
  absl::Status ForEachPart(uint32_t cell, PartWriter write) const final {
    return write({.offset = 0, .bytes = CellBytes(cell), .data = CellData(cell)});
  }
  bool Accept(uint32_t cell, uint64_t digest) const final { return digest == CellDigest(cell); }
  bool HasDigest(uint32_t) const final { return true; }
  absl::Status CheckUnchanged() const final { return absl::OkStatus(); }
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SOURCE_H_
