// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

// As many as the kernel can be built for.
constexpr int kMostNodes = 1024;

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "0-1,3" as {0, 1, 3}.
std::vector<int> NodeList(const std::string& text) {
  std::vector<int> nodes;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ',', absl::SkipWhitespace()))) {
    const std::pair<std::string, std::string> ends = absl::StrSplit(part, absl::MaxSplits('-', 1));
    int first = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) continue;
    int last = first;
    if (!ends.second.empty() && !absl::SimpleAtoi(ends.second, &last)) continue;
    for (int node = first; node <= last && node < kMostNodes; ++node) nodes.push_back(node);
  }
  return nodes;
}

// The address that a line of numa_maps begins with.
std::optional<uint64_t> AddressOf(const std::string& line) {
  uint64_t address = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), address, 16);
  if (error != std::errc() || end == line.data() + line.size() || *end != ' ') return std::nullopt;
  return address;
}

// Adds the "N0=12" of a line, which count pages of the size that it ends with.
void AddLine(const std::string& line, std::map<int, uint64_t>& bytes) {
  uint64_t page_kib = 4;
  std::map<int, uint64_t> pages;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(line, ' '))) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(word, absl::MaxSplits('=', 1));
    uint64_t value = 0;
    if (!absl::SimpleAtoi(pair.second, &value)) continue;
    int node = 0;
    if (pair.first == "kernelpagesize_kB") page_kib = value;
    if (pair.first.starts_with('N') && absl::SimpleAtoi(pair.first.substr(1), &node)) pages[node] += value;
  }
  for (const auto& [node, count] : pages) bytes[node] += count * page_kib * kKiB;
}

}  // namespace

std::vector<int> MemoryNodes(const std::string& root) {
  return NodeList(FirstLine(absl::StrCat(root, "/sys/devices/system/node/has_memory")));
}

std::optional<int> NodeForDevice(const std::string& pci_id, const std::string& root) {
  if (pci_id.empty()) return std::nullopt;
  const std::vector<int> nodes = MemoryNodes(root);
  if (nodes.size() < 2) return std::nullopt;
  int node = -1;  // as the kernel says that it does not know
  if (!absl::SimpleAtoi(FirstLine(absl::StrCat(root, "/sys/bus/pci/devices/", pci_id, "/numa_node")), &node) ||
      std::find(nodes.begin(), nodes.end(), node) == nodes.end()) {
    return std::nullopt;
  }
  return node;
}

// By the system call itself: libnuma would be a library for this one line.
absl::Status PreferNode(std::byte* address, uint64_t bytes, int node) {
  constexpr int kWordBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMostNodes / kWordBits] = {};
  mask[node / kWordBits] = 1UL << (node % kWordBits);
  // The kernel takes one bit less than it is told of.
  if (::syscall(SYS_mbind, address, bytes, MPOL_PREFERRED, mask, kMostNodes + 1, 0) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, absl::StrCat("mbind of ", bytes, " bytes to node ", node));
}

std::optional<std::map<int, uint64_t>> BytesByNode(std::span<const std::span<const std::byte>> mappings,
                                                   const std::string& root) {
  std::ifstream file(absl::StrCat(root, "/proc/self/numa_maps"));
  if (!file.is_open()) return std::nullopt;
  std::map<int, uint64_t> bytes;
  for (std::string line; std::getline(file, line);) {
    const std::optional<uint64_t> address = AddressOf(line);
    // A mapping may lie there in several parts, which have different advice; each has a line.
    const bool ours = address.has_value() && std::any_of(mappings.begin(), mappings.end(), [&](const auto& mapping) {
                        const auto begin = reinterpret_cast<uint64_t>(mapping.data());
                        return *address >= begin && *address - begin < mapping.size();
                      });
    if (ours) AddLine(line, bytes);
  }
  return bytes;
}

}  // namespace residency
