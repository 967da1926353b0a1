// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/copy_queue.h"

#include <algorithm>

#include "mechanisms/refusal.h"

namespace residency {

absl::Status CopyQueue::Stopped() {
  return Refuse(absl::StatusCode::kCancelled, "CANCELLED", "nobody waits for these bytes any more");
}

absl::Status CopyQueue::Add(CUdeviceptr destination, const std::byte* source, uint64_t bytes) {
  for (uint64_t done_bytes = 0; done_bytes < bytes;) {
    if (open_bytes_ == 0) {
      if (auto status = AwaitTurn(); !status.ok()) return status;
    }
    if (stop_.stop_requested()) {
      return Stopped();
    }
    const uint64_t part_bytes = std::min(bytes - done_bytes, piece_bytes_ - open_bytes_);
    const absl::Status copied =
        device_.CopyToDevice(destination + done_bytes, source + done_bytes, part_bytes, stream_);
    if (!copied.ok()) return copied;
    done_bytes += part_bytes;
    open_bytes_ += part_bytes;
    added_bytes_ += part_bytes;
    if (open_bytes_ == piece_bytes_) {
      if (auto status = EndPiece(); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

// Waits until the piece is through whose place the next one takes, and sees how long it took by the device's clock.
absl::Status CopyQueue::AwaitTurn() {
  if (pieces_ < kPiecesUnderWay) return absl::OkStatus();
  const StreamEvent& end = ends_[(pieces_ - kPiecesUnderWay) % ends_.size()];
  if (auto status = device_.Synchronize(end); !status.ok()) return status;
  arrived_bytes_ = end_bytes_[(pieces_ - kPiecesUnderWay) % ends_.size()];
  if (pieces_ == kPiecesUnderWay || piece_bytes_ >= most_bytes_) return absl::OkStatus();
  const StreamEvent& before = ends_[(pieces_ - kPiecesUnderWay - 1) % ends_.size()];
  const auto took = device_.Elapsed(before, end);
  if (!took.ok()) return took.status();
  if (*took < absl::Milliseconds(1)) piece_bytes_ *= 2;
  return absl::OkStatus();
}

absl::Status CopyQueue::EndPiece() {
  StreamEvent& end = ends_[pieces_ % ends_.size()];
  if (!end.valid()) {
    auto event = device_.CreateEvent();
    if (!event.ok()) return event.status();
    end = *std::move(event);
  }
  end_bytes_[pieces_ % ends_.size()] = added_bytes_;
  ++pieces_;
  open_bytes_ = 0;
  return device_.Record(end, stream_);
}

}  // namespace residency
