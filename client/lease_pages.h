// SPDX-License-Identifier: Apache-2.0
//
// What a lease is made of in the client's process: a reserved span of device addresses, the cells mapped in it
// read-only, and the use word. The addresses never change while the object lives; the cells come and go.
//
// Threads: the reader thread maps and unmaps. The functions marked "any thread" are also called by users.
#ifndef RESIDENCY_CLIENT_LEASE_PAGES_H_
#define RESIDENCY_CLIENT_LEASE_PAGES_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/device.h"
#include "mechanisms/unique_fd.h"
#include "mechanisms/use_word.h"

namespace residency {

// As LeaseGranted states it.
struct LeaseGrant {
  uint64_t lease_id = 0;
  std::string model;
  std::string device_uuid;
  uint64_t layout_digest = 0;
  uint64_t span_bytes = 0;
};

struct CellPlace {
  uint32_t index = 0;
  uint64_t device_offset = 0;
  uint64_t bytes = 0;
};

class LeasePages {
 public:
  // Reserves the span on `device` (which outlives the object) and maps the use word behind `use_word_fd` (borrowed).
  // `reader_eventfd` is what the last user of a closed word writes to.
  static absl::StatusOr<std::unique_ptr<LeasePages>> Open(const Device& device, LeaseGrant grant, int use_word_fd,
                                                          int reader_eventfd);
  // Unmaps what is left.
  ~LeasePages();
  LeasePages(const LeasePages&) = delete;
  LeasePages& operator=(const LeasePages&) = delete;

  // Any thread.
  const LeaseGrant& grant() const { return grant_; }
  const Device& device() const { return device_; }
  CUdeviceptr address() const { return span_.get(); }
  UseWord& word() { return word_; }
  // Remembers that work on `streams` may touch the cells; none stands for the whole context. Called inside a use.
  void RememberStreams(std::span<const CUstream> streams);
  void ForgetStream(CUstream stream);
  // A stream of the lease's own for reading cells back, made at the first call.
  absl::StatusOr<CUstream> ReadStream();

  // Imports the memory behind `descriptors` (borrowed, one for each place) and maps it where `places` says.
  // INVALID_ARGUMENT/PROTOCOL where a place is outside the span or taken; errors of the driver name the cell. After an
  // error some of the cells may be mapped: UnmapPiece takes them off.
  absl::Status MapCells(std::span<const CellPlace> places, std::span<const UniqueFd> descriptors);

  // Waits until the device work of past uses is done, and forgets their streams. Nobody is inside.
  // UNAVAILABLE/CAPTURING where a stream capture keeps the whole context from being waited for: ask again later.
  absl::Status WaitForDeviceWork();

  // Unmaps a run of adjacent cells and says which; empty once nothing is mapped. After an error the cells are still
  // mapped.
  absl::StatusOr<std::vector<uint32_t>> UnmapPiece();
  bool has_cells() const { return !cells_.empty(); }

 private:
  struct MappedCell {
    uint32_t index = 0;
    uint64_t bytes = 0;
  };

  LeasePages(const Device& device, LeaseGrant grant, UseWordMapping mapping, int reader_eventfd)
      : device_(device),
        grant_(std::move(grant)),
        word_mapping_(std::move(mapping)),
        word_(word_mapping_.word(reader_eventfd)) {}
  absl::Status CheckPlace(const CellPlace& place) const;
  absl::Status MapCell(const CellPlace& place, int descriptor);
  absl::Status SynchronizeContext();
  absl::Status WaitForStream(CUstream stream);

  const Device& device_;
  const LeaseGrant grant_;
  UseWordMapping word_mapping_;
  UseWord word_;
  AddressRange span_;
  std::map<uint64_t, MappedCell> cells_;  // by device offset

  std::atomic<bool> whole_context_{false};
  std::mutex mutex_;
  std::vector<CUstream> streams_;  // guarded by mutex_
  Stream read_stream_;             // guarded by mutex_
};

}  // namespace residency

#endif  // RESIDENCY_CLIENT_LEASE_PAGES_H_
