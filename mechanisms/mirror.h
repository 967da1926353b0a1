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
//  3. Page-locked pieces are whole cells, so no copy of a cell crosses a piece.
//
// Threads: Build runs on a worker, for it blocks. Afterwards the bytes and digests are immutable and for any thread;
// Pin, Unpin and pinned_bytes are for the thread that owns the mirror.
#ifndef RESIDENCY_MECHANISMS_MIRROR_H_
#define RESIDENCY_MECHANISMS_MIRROR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/device.h"
#include "mechanisms/layout.h"
#include "mechanisms/manifest.h"
#include "mechanisms/refill.h"
#include "mechanisms/source.h"
#include "mechanisms/unique_fd.h"
#include "mechanisms/units.h"

namespace residency {

// Most bytes that are page-locked by one call, so that a driver's limit on one registration is never met and a
// failure gives back in steps. A cell has at most that many.
inline constexpr uint64_t kPinPieceBytes = 256 * kMiB;
static_assert(kMaxCellBytes <= kPinPieceBytes);

struct MirrorOptions {
  RefillOptions refill;
  // How many bytes of tensors are there; false cancels. Called on a worker of the build, one at a time, with rising
  // values. May be empty.
  std::function<bool(uint64_t done_bytes)> progress;
};

// A mapping of memory into this process, which it owns.
class HostMapping {
 public:
  HostMapping() = default;
  HostMapping(std::byte* address, uint64_t bytes) : address_(address), bytes_(bytes) {}
  HostMapping(HostMapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  std::byte* address() const { return address_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* address_ = nullptr;
  uint64_t bytes_ = 0;
};

class Mirror final : public Source {
 public:
  // Reads the tensors of component `component_index` from the manifest's files. The layout was made of this manifest,
  // so that the components and tensors of both correspond by their numbers.
  // What Refill answers; CANCELLED/CANCELLED when `progress` says so;
  // RESOURCE_EXHAUSTED/HOST_MEMORY with the needed bytes where the system has no memory for it;
  // INVALID_ARGUMENT/LAYOUT_MISMATCH where layout and manifest are not of one model.
  static absl::StatusOr<Mirror> Build(const Layout& layout, uint32_t component_index, const Manifest& manifest,
                                      const MirrorOptions& options);

  Mirror(Mirror&&) noexcept = default;
  // Gives its page-locked pieces back before its memory.
  Mirror& operator=(Mirror&& other) noexcept;
  ~Mirror() override = default;

  // Page-locks all of it for `device`, which outlives the pinning: after that, copies go at the link's rate. Nothing
  // to do where it is pinned already. On failure nothing stays pinned:
  // RESOURCE_EXHAUSTED/PIN_LIMIT with the bytes that all of it needs, and those that could be had before;
  // otherwise what Device::RegisterHost answers.
  absl::Status Pin(const Device& device);
  void Unpin() { pinned_.clear(); }
  uint64_t pinned_bytes() const;

  const std::byte* CellData(uint32_t cell) const override;
  uint64_t CellDigest(uint32_t cell) const override;

  // The image and its memfd (borrowed), for handing to clients. Reads need no system call and never fail.
  const std::byte* data() const { return mapping_.address(); }
  uint64_t bytes() const { return mapping_.bytes(); }
  int fd() const { return fd_.get(); }

  // How it was read.
  const RefillReport& report() const { return report_; }

 private:
  // One cell within the image.
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t digest = 0;
  };

  Mirror(UniqueFd fd, HostMapping mapping, uint32_t first_cell, std::vector<Extent> cells, RefillReport report)
      : fd_(std::move(fd)),
        mapping_(std::move(mapping)),
        first_cell_(first_cell),
        cells_(std::move(cells)),
        report_(report) {}

  const Extent& ExtentOf(uint32_t cell) const;

  UniqueFd fd_;
  HostMapping mapping_;
  uint32_t first_cell_;
  std::vector<Extent> cells_;
  RefillReport report_;
  std::vector<HostRegistration> pinned_;  // after mapping_, so that it goes first
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MIRROR_H_
