// SPDX-License-Identifier: Apache-2.0
//
// A mirror is the host image of one component, laid out as on the device: what an activation copies from, and the
// truth while the GPU's copy is a cache. It is a memfd, so that it outlives this process where somebody keeps its
// descriptor, and a client can map it to stream from it. Once complete it is sealed against every later write and
// change of size; a sealed mirror is a complete one, which is how a successor of this process can tell.
//
// Invariants:
//  1. The memfd has exactly LayoutComponent::span_bytes bytes; what no tensor covers is zero.
//  2. Its bytes are those of files that did not change while they were read, and equal their digests.
//  3. Page-locked pieces are whole cells, so no copy of a cell crosses a piece, and all of a mirror is locked or none.
//
// Threads: immutable, for any thread. ReadMirrors (mirror_read.h) makes them.
#ifndef RESIDENCY_MECHANISMS_MIRROR_H_
#define RESIDENCY_MECHANISMS_MIRROR_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "mechanisms/device.h"
#include "mechanisms/mirror_memory.h"
#include "mechanisms/source.h"

namespace residency {

class Mirror final : public ImageSource {
 public:
  // One cell within the image.
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t digest = 0;
  };

  // Of a complete and sealed image whose first cell is `first_cell` of the layout. `pinned` are the pieces that are
  // page-locked: all or none.
  Mirror(MirrorMemory memory, uint32_t first_cell, std::vector<Extent> cells, std::vector<HostRegistration> pinned);
  Mirror(Mirror&&) noexcept = default;
  // Gives its page-locked pieces back before its memory.
  Mirror& operator=(Mirror&& other) noexcept;
  ~Mirror() override = default;

  // Of all its bytes, or 0.
  uint64_t pinned_bytes() const;

  const std::byte* CellData(uint32_t cell) const override;
  uint64_t CellBytes(uint32_t cell) const override;
  uint64_t CellDigest(uint32_t cell) const override;

  // The image and its memfd (borrowed), for handing to clients. Reads need no system call and never fail.
  const std::byte* data() const { return memory_.address(); }
  uint64_t bytes() const { return memory_.bytes(); }
  int fd() const { return memory_.fd(); }

 private:
  const Extent& ExtentOf(uint32_t cell) const;

  MirrorMemory memory_;
  uint32_t first_cell_;
  std::vector<Extent> cells_;
  std::vector<HostRegistration> pinned_;  // after memory_, so that it goes first
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MIRROR_H_
