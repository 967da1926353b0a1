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

// How much goes between two looks at whether to stop. Four pieces are under way. At 50 MB/s the first ones take 1.4 s;
// a link on which a piece takes less than a millisecond gets larger ones, until that is seen of the larger ones too,
// since each costs it some 5 us: 8 GiB in pieces of 16 MiB take 1.2 % longer than in pieces of 64 MiB (158.3 against
// 156.4 ms on an H200, tests/bench/results).
struct CopyPieces {
  uint64_t first_bytes = uint64_t{16} << 20;
  uint64_t most_bytes = uint64_t{64} << 20;
};

class CopyQueue {
 public:
  static constexpr size_t kPiecesUnderWay = 4;

  // The arguments outlive the queue. The caller synchronizes `stream` when it has added all, and after an error.
  CopyQueue(const Device& device, const Stream& stream, std::stop_token stop, const CopyPieces& pieces = {})
      : device_(device),
        stream_(stream),
        stop_(std::move(stop)),
        most_bytes_(pieces.most_bytes),
        piece_bytes_(pieces.first_bytes) {}

  const std::stop_token& stop() const { return stop_; }
  // What Add answers when it was told to stop.
  static absl::Status Stopped();

  // Enqueues the copy, waiting for earlier ones where too much is under way.
  // CANCELLED/CANCELLED: told to stop, perhaps with part of this copy enqueued; UNAVAILABLE/DEVICE_LOST.
  absl::Status Add(CUdeviceptr destination, const std::byte* source, uint64_t bytes);

  // Of all that was added, and, from the front of it, what is known to have arrived.
  uint64_t added_bytes() const { return added_bytes_; }
  uint64_t arrived_bytes() const { return arrived_bytes_; }

 private:
  absl::Status AwaitTurn();
  absl::Status EndPiece();

  const Device& device_;
  const Stream& stream_;
  const std::stop_token stop_;
  const uint64_t most_bytes_;  // of a piece
  // Of the last pieces, in turn, and of the one before them; made when first needed.
  std::array<StreamEvent, kPiecesUnderWay + 1> ends_;
  std::array<uint64_t, kPiecesUnderWay + 1> end_bytes_{};  // of all pieces up to each
  uint64_t added_bytes_ = 0;
  uint64_t arrived_bytes_ = 0;
  size_t pieces_ = 0;
  uint64_t piece_bytes_;
  uint64_t open_bytes_ = 0;  // enqueued after the last piece's end
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_COPY_QUEUE_H_
