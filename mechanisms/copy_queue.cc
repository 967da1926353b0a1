// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/copy_queue.h"

#include <algorithm>

#include "mechanisms/refusal.h"

namespace residency {

absl::Status CopyQueue::Add(CUdeviceptr destination, const std::byte* source, uint64_t bytes) {
  for (uint64_t done_bytes = 0; done_bytes < bytes;) {
    if (open_bytes_ == 0) {
      if (auto status = AwaitTurn(); !status.ok()) return status;
    }
    if (stop_.stop_requested()) {
      return Refuse(absl::StatusCode::kCancelled, "CANCELLED", "nobody waits for these bytes any more");
    }
    const uint64_t part_bytes = std::min(bytes - done_bytes, kPieceBytes - open_bytes_);
    const absl::Status copied =
        device_.CopyToDevice(destination + done_bytes, source + done_bytes, part_bytes, stream_);
    if (!copied.ok()) return copied;
    done_bytes += part_bytes;
    open_bytes_ += part_bytes;
    if (open_bytes_ == kPieceBytes) {
      if (auto status = EndPiece(); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

// Waits until the piece is through whose place the next one takes.
absl::Status CopyQueue::AwaitTurn() const {
  const StreamEvent& end = ends_[pieces_ % kPiecesUnderWay];
  return end.valid() ? device_.Synchronize(end) : absl::OkStatus();
}

absl::Status CopyQueue::EndPiece() {
  StreamEvent& end = ends_[pieces_ % kPiecesUnderWay];
  if (!end.valid()) {
    auto event = device_.CreateEvent();
    if (!event.ok()) return event.status();
    end = *std::move(event);
  }
  ++pieces_;
  open_bytes_ = 0;
  return device_.Record(end, stream_);
}

}  // namespace residency
