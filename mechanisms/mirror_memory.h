// SPDX-License-Identifier: Apache-2.0
//
// The memory of a mirror: a memfd, of huge pages where the system has them, mapped writable into this process. Calls
// that take a range may come from several threads at once.
#ifndef RESIDENCY_MECHANISMS_MIRROR_MEMORY_H_
#define RESIDENCY_MECHANISMS_MIRROR_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/unique_fd.h"

namespace residency {

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

class MirrorMemory {
 public:
  // `bytes` of zeros, none of them there before it is populated. `component` names the memfd, and what a refusal is
  // about: RESOURCE_EXHAUSTED/HOST_MEMORY with the needed bytes where the system has no memory or addresses for it.
  static absl::StatusOr<MirrorMemory> Make(const std::string& component, uint64_t bytes);

  // Has pages that are not there yet come from that node of the host while it has any: see PreferNode of numa.h.
  absl::Status Prefer(int node) const;

  // Asks for the pages of a range before it is written to. Running out of memory is an error here, HOST_MEMORY, and a
  // signal in the middle of a copy otherwise. It is also one entry into the kernel in place of one for each page.
  absl::Status Populate(uint64_t offset, uint64_t bytes) const;

  // Seals against writing through any descriptor, present or future, and against a change of size. The mapping at hand
  // stays writable, because page-locking without READ_ONLY asks for that; nobody writes to it. Pages may be locked
  // already: the seal that waits for whoever has them is F_SEAL_WRITE.
  absl::Status Seal() const;

  std::byte* address() const { return mapping_.address(); }
  uint64_t bytes() const { return mapping_.bytes(); }
  int fd() const { return fd_.get(); }

 private:
  MirrorMemory(std::string component, UniqueFd fd, HostMapping mapping)
      : component_(std::move(component)), fd_(std::move(fd)), mapping_(std::move(mapping)) {}

  std::string component_;
  UniqueFd fd_;
  HostMapping mapping_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MIRROR_MEMORY_H_
