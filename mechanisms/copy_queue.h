// SPDX-License-Identifier: Apache-2.0
//
// Copies to the device on one stream, of which only so many bytes are under way at a time that they can be given up
// soon: what a stream was told cannot be taken back. Used by the arena within one call, on the device loop.
#ifndef RESIDENCY_MECHANISMS_COPY_QUEUE_H_
#define RESIDENCY_MECHANISMS_COPY_QUEUE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <utility>

#include "absl/status/status.h"
#include "mechanisms/device.h"

namespace residency {

class CopyQueue {
 public:
  // At 55 GB/s four pieces take 1.2 ms, against some 50 us until a thread that waits for the first of them runs again,
  // so the link stays busy; at 50 MB/s they take 1.4 s. Streaming reaches the link's rate from pieces of 16 MiB up.
  static constexpr uint64_t kPieceBytes = uint64_t{16} << 20;
  static constexpr size_t kPiecesUnderWay = 4;

  // The arguments outlive the queue. The caller synchronizes `stream` when it has added all, and after an error.
  CopyQueue(const Device& device, const Stream& stream, std::stop_token stop)
      : device_(device), stream_(stream), stop_(std::move(stop)) {}

  // Enqueues the copy, waiting for earlier ones where too much is under way.
  // CANCELLED/CANCELLED: told to stop, perhaps with part of this copy enqueued; UNAVAILABLE/DEVICE_LOST.
  absl::Status Add(CUdeviceptr destination, const std::byte* source, uint64_t bytes);

 private:
  absl::Status AwaitTurn() const;
  absl::Status EndPiece();

  const Device& device_;
  const Stream& stream_;
  const std::stop_token stop_;
  std::array<StreamEvent, kPiecesUnderWay> ends_;  // of the last pieces, in turn; made when first needed
  size_t pieces_ = 0;
  uint64_t open_bytes_ = 0;  // enqueued after the last piece's end
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_COPY_QUEUE_H_
