// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_transfer.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace residency {
namespace {

// Small enough that an unmap under a copy is noticed soon, large enough that the look-up costs nothing.
constexpr uint64_t kChunkBytes = uint64_t{1} << 20;
constexpr uint64_t kPageBytes = 4096;

CUresult ResultOfErrno(int error) { return error == EFAULT ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_UNKNOWN; }

// Runs `move(fd, file_offset, done, bytes)`, one pread or pwrite, over the device range chunk by chunk.
template <typename Move>
CUresult ForEachChunk(SimAddressSpace& space, int card_index, SimLink* link, CUdeviceptr device, uint64_t bytes,
                      int rights, Move move) {
  uint64_t done = 0;
  while (done < bytes) {
    const uint64_t chunk_bytes = std::min(bytes - done, kChunkBytes);
    if (link != nullptr) link->Carry(chunk_bytes);
    for (const uint64_t chunk_end = done + chunk_bytes; done < chunk_end;) {
      const std::optional<SimPiece> piece = space.Locate(device + done, chunk_end - done, card_index, rights);
      if (!piece) return CUDA_ERROR_ILLEGAL_ADDRESS;
      const ssize_t moved =
          move(piece->allocation->file.get(), static_cast<off_t>(piece->offset_bytes), done, piece->bytes);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) return ResultOfErrno(errno);
      if (moved == 0) return CUDA_ERROR_UNKNOWN;  // Somebody cut the file.
      done += static_cast<uint64_t>(moved);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

void SimLink::Carry(uint64_t bytes) {
  if (bytes_per_second_ == 0) return;
  using Clock = std::chrono::steady_clock;
  const auto takes = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(static_cast<double>(bytes) / static_cast<double>(bytes_per_second_)));
  Clock::time_point until;
  {
    std::lock_guard lock(mutex_);
    free_at_ = until = std::max(free_at_, Clock::now()) + takes;
  }
  // The clock of steady_clock is CLOCK_MONOTONIC here. An absolute deadline does not add up wake-up delays.
  const auto since_epoch = std::chrono::duration_cast<std::chrono::nanoseconds>(until.time_since_epoch()).count();
  const timespec deadline{since_epoch / 1'000'000'000, since_epoch % 1'000'000'000};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
  }
}

CUresult SimCopyToDevice(SimAddressSpace& space, int card_index, SimLink& link, CUdeviceptr device, const void* host,
                         uint64_t bytes, bool locked_file) {
  static constexpr char kZeros[kPageBytes] = {};
  return ForEachChunk(space, card_index, &link, device, bytes, SimAddressSpace::kReadWrite,
                      [&](int fd, off_t offset, uint64_t done, uint64_t piece_bytes) {
                        const char* from = static_cast<const char*>(host) + done;
                        const ssize_t moved = ::pwrite(fd, from, piece_bytes, offset);
                        if (moved >= 0 || errno != EFAULT || !locked_file) return moved;
                        const uint64_t in_page = kPageBytes - reinterpret_cast<uintptr_t>(from) % kPageBytes;
                        return ::pwrite(fd, kZeros, std::min(piece_bytes, in_page), offset);
                      });
}

CUresult SimCopyToHost(SimAddressSpace& space, int card_index, SimLink& link, void* host, CUdeviceptr device,
                       uint64_t bytes) {
  return ForEachChunk(space, card_index, &link, device, bytes, SimAddressSpace::kRead,
                      [&](int fd, off_t offset, uint64_t done, uint64_t piece_bytes) {
                        return ::pread(fd, static_cast<char*>(host) + done, piece_bytes, offset);
                      });
}

CUresult SimFill(SimAddressSpace& space, int card_index, CUdeviceptr device, unsigned char value, uint64_t bytes) {
  const std::vector<unsigned char> source(std::min(bytes, kChunkBytes), value);
  return ForEachChunk(space, card_index, nullptr, device, bytes, SimAddressSpace::kReadWrite,
                      [&](int fd, off_t offset, uint64_t, uint64_t piece_bytes) {
                        return ::pwrite(fd, source.data(), piece_bytes, offset);
                      });
}

}  // namespace residency
