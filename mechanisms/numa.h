// SPDX-License-Identifier: Apache-2.0
//
// Which part of the host's memory is near a GPU, where the host has several (NUMA nodes), and on which of them pages
// truly lie. Reads a few small files of /sys, and /proc/self/numa_maps, for which the kernel walks this process's page
// tables. Any thread. `root` is the directory that has sys and proc, "" for the system's.
#ifndef RESIDENCY_MECHANISMS_NUMA_H_
#define RESIDENCY_MECHANISMS_NUMA_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace residency {

// The nodes that have memory, rising. Empty where the system does not say.
std::vector<int> MemoryNodes(const std::string& root = "");

// The node with memory that the PCI device `pci_id`, as DeviceInfo spells it, hangs on. Nothing where there is no
// choice: one node or none, a device that the system does not know, or that it knows no node with memory for.
std::optional<int> NodeForDevice(const std::string& pci_id, const std::string& root = "");

// Has the pages of a range, which begins on a page, come from `node` as long as that has any, then from others; pages
// that are there stay where they are. For shared memory this holds for the memory, whoever asks for the page.
// The error of mbind(2): PERMISSION_DENIED where a container does not let us (EPERM), INVALID_ARGUMENT for a node that
// is none, or none of this process's.
absl::Status PreferNode(std::byte* address, uint64_t bytes, int node);

// Bytes by node of the pages that are there of these mappings, wholly, each of which nobody else's adjoins in one
// mapping. What the kernel counts, not what was asked for. Nothing where it does not tell.
std::optional<std::map<int, uint64_t>> BytesByNode(std::span<const std::span<const std::byte>> mappings,
                                                   const std::string& root = "");

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_NUMA_H_
