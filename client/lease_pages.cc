// SPDX-License-Identifier: Apache-2.0
#include "client/lease_pages.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// A piece is what the daemon can hand on at once, so it is bounded though one unmapping could take all. So many cells
// of 64 MiB are unmapped in 0.4 ms and filled again in 19 (H200).
constexpr size_t kMaxPieceCells = 16;

absl::Status Annotate(const absl::Status& status, std::string_view what) {
  std::optional<Refusal> refusal = GetRefusal(status);
  const std::string message = absl::StrCat(std::string(what), ": ", status.message());
  if (!refusal.has_value()) return absl::Status(status.code(), message);
  return Refuse(status.code(), *std::move(refusal), message);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LeasePages>> LeasePages::Open(const Device& device, LeaseGrant grant, int use_word_fd,
                                                             int reader_eventfd) {
  auto mapping = UseWordMapping::Map(use_word_fd);
  if (!mapping.ok()) return mapping.status();
  std::unique_ptr<LeasePages> pages(new LeasePages(device, std::move(grant), *std::move(mapping), reader_eventfd));
  // A model without bytes has a lease like any other, with nothing to map.
  if (pages->grant_.span_bytes == 0) return pages;
  auto span = device.Reserve(pages->grant_.span_bytes);
  if (!span.ok()) {
    return Annotate(span.status(), absl::StrCat("reserving ", pages->grant_.span_bytes, " bytes of addresses for ",
                                                pages->grant_.model));
  }
  pages->span_ = *std::move(span);
  return pages;
}

LeasePages::~LeasePages() {
  // What a driver refuses to unmap goes with the process.
  while (true) {
    const auto piece = UnmapPiece();
    if (!piece.ok() || piece->empty()) break;
  }
}

void LeasePages::RememberStreams(std::span<const CUstream> streams) {
  if (streams.empty()) {
    if (!whole_context_.load(std::memory_order_relaxed)) whole_context_.store(true, std::memory_order_relaxed);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (CUstream stream : streams) {
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
  }
}

void LeasePages::ForgetStream(CUstream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase(streams_, stream);
}

absl::StatusOr<CUstream> LeasePages::ReadStream() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!read_stream_.valid()) {
    auto stream = device_.CreateStream();
    if (!stream.ok()) return stream.status();
    read_stream_ = *std::move(stream);
  }
  return read_stream_.get();
}

absl::Status LeasePages::CheckPlace(const CellPlace& place) const {
  const uint64_t span_bytes = grant_.span_bytes;
  const bool inside =
      place.bytes > 0 && place.device_offset <= span_bytes && place.bytes <= span_bytes - place.device_offset;
  if (!inside) {
    return Refuse(absl::StatusCode::kInvalidArgument, "PROTOCOL",
                  absl::StrCat("cell ", place.index, " of ", grant_.model, ", ", place.bytes, " bytes at ",
                               place.device_offset, ", is not inside the span of ", span_bytes, " bytes"));
  }
  const auto next = cells_.lower_bound(place.device_offset);
  const bool hits_next = next != cells_.end() && next->first < place.device_offset + place.bytes;
  const bool hits_previous =
      next != cells_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > place.device_offset;
  if (hits_next || hits_previous) {
    return Refuse(absl::StatusCode::kInvalidArgument, "PROTOCOL",
                  absl::StrCat("cell ", place.index, " of ", grant_.model, " would lie over one that is mapped"));
  }
  return absl::OkStatus();
}

absl::Status LeasePages::MapCell(const CellPlace& place, int descriptor) {
  if (auto status = CheckPlace(place); !status.ok()) return status;
  // The handle may go at once: mapped memory lives until it is unmapped.
  auto memory = device_.Import(descriptor, place.bytes);
  if (!memory.ok()) return memory.status();
  if (auto status = device_.Map(address() + place.device_offset, *memory); !status.ok()) return status;
  cells_[place.device_offset] = {place.index, place.bytes};
  return absl::OkStatus();
}

absl::Status LeasePages::MapCells(std::span<const CellPlace> places, std::span<const UniqueFd> descriptors) {
  for (size_t i = 0; i < places.size(); ++i) {
    if (auto status = MapCell(places[i], descriptors[i].get()); !status.ok()) {
      return Annotate(status, absl::StrCat("mapping cell ", places[i].index, " of ", grant_.model));
    }
  }
  // One call for each run of adjacent cells, because its cost is per call and per cell.
  for (size_t first = 0; first < places.size();) {
    uint64_t bytes = places[first].bytes;
    size_t end = first + 1;
    while (end < places.size() && places[end].device_offset == places[first].device_offset + bytes) {
      bytes += places[end++].bytes;
    }
    const auto status = device_.SetAccess(address() + places[first].device_offset, bytes, Access::kReadOnly);
    if (!status.ok()) return Annotate(status, absl::StrCat("opening cell ", places[first].index, " of ", grant_.model));
    first = end;
  }
  return absl::OkStatus();
}

absl::Status LeasePages::SynchronizeContext() {
  if (auto status = device_.MakeCurrent(); !status.ok()) return status;
  const CUresult result = device_.driver().cuCtxSynchronize();
  const bool capturing = result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ||
                         result == CUDA_ERROR_STREAM_CAPTURE_UNJOINED || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  if (capturing) {
    return Refuse(absl::StatusCode::kUnavailable, "CAPTURING",
                  absl::StrCat("a stream capture keeps the work on ", grant_.model, " from being waited for"));
  }
  return DriverStatus(device_.driver(), result, "cuCtxSynchronize");
}

absl::Status LeasePages::WaitForStream(CUstream stream) {
  if (auto status = device_.MakeCurrent(); !status.ok()) return status;
  const Driver& driver = device_.driver();
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult asked = driver.cuStreamIsCapturing(stream, &capture);
  // No event can be recorded there now, and what was launched before the capture may still run.
  if (asked == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE) {
    return Refuse(absl::StatusCode::kUnavailable, "CAPTURING", "a stream that a use named is being captured");
  }
  auto event = device_.CreateEvent();
  if (!event.ok()) return event.status();
  const CUresult recorded = driver.cuEventRecord(event->get(), stream);
  if (auto status = DriverStatus(driver, recorded, "cuEventRecord"); !status.ok()) return status;
  return device_.Synchronize(*event);
}

absl::Status LeasePages::WaitForDeviceWork() {
  std::vector<CUstream> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams = streams_;
  }
  bool whole_context = whole_context_.load(std::memory_order_relaxed);
  for (CUstream stream : streams) {
    // A stream that was destroyed without Forget cannot be asked; its work can.
    const absl::Status waited = whole_context ? absl::OkStatus() : WaitForStream(stream);
    if (ReasonOf(waited) == "CAPTURING") return waited;
    if (!waited.ok()) whole_context = true;
  }
  if (whole_context) {
    if (auto status = SynchronizeContext(); !status.ok()) return status;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.clear();
  whole_context_.store(false, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint32_t>> LeasePages::UnmapPiece() {
  std::vector<uint32_t> indices;
  if (cells_.empty()) return indices;
  // From the end, where a model's remainder is, of a size that another model may not be able to use: that one goes back
  // to the driver before the first byte of the other model can flow.
  const uint64_t end = cells_.rbegin()->first + cells_.rbegin()->second.bytes;
  uint64_t start = end;
  auto cell = cells_.end();
  while (cell != cells_.begin() && indices.size() < kMaxPieceCells) {
    const auto before = std::prev(cell);
    if (before->first + before->second.bytes != start) break;
    indices.push_back(before->second.index);
    start = before->first;
    cell = before;
  }
  if (auto status = device_.Unmap(address() + start, end - start); !status.ok()) {
    return Annotate(status, absl::StrCat("unmapping cells of ", grant_.model));
  }
  cells_.erase(cell, cells_.end());
  return indices;
}

}  // namespace residency
