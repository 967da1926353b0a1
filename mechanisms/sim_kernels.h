// SPDX-License-Identifier: Apache-2.0
//
// The kernels that the simulated driver knows, by name, and how one of them runs. Any thread.
#ifndef RESIDENCY_MECHANISMS_SIM_KERNELS_H_
#define RESIDENCY_MECHANISMS_SIM_KERNELS_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mechanisms/sim_address_space.h"
#include "mechanisms/sim_driver.h"

namespace residency {

struct SimKernelEntry {
  std::string name;
  std::vector<uint32_t> param_bytes;
  SimKernel kernel;
};

// The kernel of that name, or nullptr. Entries are never removed.
const SimKernelEntry* FindSimKernel(std::string_view name);

// The parameters of one launch, copied: the caller's are good only until cuLaunchKernel returns.
std::vector<std::vector<unsigned char>> CopySimParams(const SimKernelEntry& entry, void** params);

// Runs the kernel now. ILLEGAL_ADDRESS also when memory that it used was unmapped meanwhile.
CUresult RunSimKernel(const SimKernelEntry& entry, std::vector<std::vector<unsigned char>> params,
                      SimAddressSpace& space, int card_index);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_KERNELS_H_
