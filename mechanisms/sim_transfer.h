// SPDX-License-Identifier: Apache-2.0
//
// The copy engines of a simulated card: how bytes move between host and device, and how fast. Everything
// here runs on the thread of the stream that does the copy. Bytes go through the memory's file and not
// through the mapping, so that a host address that went away, or a device address that was unmapped during
// the copy, is an error of the copy and no signal for the process.
#ifndef RESIDENCY_MECHANISMS_SIM_TRANSFER_H_
#define RESIDENCY_MECHANISMS_SIM_TRANSFER_H_

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <mutex>

#include "mechanisms/sim_address_space.h"

namespace residency {

// One direction of a card's link, shared by the streams of the process: who comes first has it for as long
// as the bytes take.
class SimLink {
 public:
  // 0: as fast as memory.
  explicit SimLink(uint64_t bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  // Returns when `bytes` have had their time on the link. Holds no lock while it waits.
  void Carry(uint64_t bytes);

 private:
  const uint64_t bytes_per_second_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point free_at_;
};

// Each looks up the addresses anew for every chunk. ILLEGAL_ADDRESS when a part is not mapped (any more)
// with the needed right or the host memory does not answer; UNKNOWN when the file system has no room for
// a page that was promised.
// `locked_file`: the host memory is locked pages of a file, which a card goes on reading when the file was cut. Nothing
// keeps such pages here, so they read as zeros.
CUresult SimCopyToDevice(SimAddressSpace& space, int card_index, SimLink& link, CUdeviceptr device, const void* host,
                         uint64_t bytes, bool locked_file);
CUresult SimCopyToHost(SimAddressSpace& space, int card_index, SimLink& link, void* host, CUdeviceptr device,
                       uint64_t bytes);
CUresult SimFill(SimAddressSpace& space, int card_index, CUdeviceptr device, unsigned char value, uint64_t bytes);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_TRANSFER_H_
