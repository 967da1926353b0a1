// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/numa.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <array>
#include <catch2/catch.hpp>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "mechanisms/mirror_read.h"
#include "mechanisms/units.h"
#include "tests/mirror_models.h"
#include "tests/source_files.h"

namespace residency {
namespace {

// A host of two sockets, each with memory and a GPU, of a node without memory, and of a GPU that it knows no node for.
class TwoSockets {
 public:
  TwoSockets() {
    Write("sys/devices/system/node/has_memory", "0-1\n");
    Write("sys/devices/system/node/possible", "0-15\n");
    Write("sys/bus/pci/devices/0000:01:00.0/numa_node", "0\n");
    Write("sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n");
    Write("sys/bus/pci/devices/0000:d1:00.0/numa_node", "2\n");
    Write("sys/bus/pci/devices/0000:e1:00.0/numa_node", "-1\n");
  }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = dir_.Path(path);
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  std::string root() const { return dir_.Path(""); }

 private:
  TempDir dir_;
};

TEST_CASE("memory for a GPU belongs to the node that the system says it hangs on") {
  TwoSockets host;
  CHECK(MemoryNodes(host.root()) == std::vector<int>{0, 1});
  CHECK(NodeForDevice("0000:01:00.0", host.root()) == 0);
  CHECK(NodeForDevice("0000:c1:00.0", host.root()) == 1);
  host.Write("sys/devices/system/node/has_memory", "0,2-3,9\n");
  CHECK(MemoryNodes(host.root()) == std::vector<int>{0, 2, 3, 9});
  CHECK(NodeForDevice("0000:d1:00.0", host.root()) == 2);
}

TEST_CASE("where there is no choice, or nothing is known, no node is named") {
  TwoSockets host;
  CHECK(NodeForDevice("0000:d1:00.0", host.root()) == std::nullopt);  // its node has no memory
  CHECK(NodeForDevice("0000:e1:00.0", host.root()) == std::nullopt);  // -1
  CHECK(NodeForDevice("0000:ff:00.0", host.root()) == std::nullopt);  // no such device
  CHECK(NodeForDevice("", host.root()) == std::nullopt);
  host.Write("sys/devices/system/node/has_memory", "0\n");
  CHECK(NodeForDevice("0000:01:00.0", host.root()) == std::nullopt);
  const TempDir empty;
  CHECK(MemoryNodes(empty.Path("")).empty());
  CHECK(NodeForDevice("0000:01:00.0", empty.Path("")) == std::nullopt);
}

std::span<const std::byte> At(uint64_t address, uint64_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

TEST_CASE("what the kernel counts of a mapping is summed up by node, and nothing of other mappings") {
  TwoSockets host;
  // As a two-socket machine writes it: a model that has spilled, one of 2 MiB pages, and others' memory.
  host.Write("proc/self/numa_maps",
             "55d0c0a00000 default file=/usr/sbin/residencyd mapped=120 N0=120 kernelpagesize_kB=4\n"
             "7f0000000000 prefer:0 file=/memfd:residency-unet\\040(deleted) dirty=768 active=0 N0=512 N1=256 "
             "kernelpagesize_kB=4\n"
             "7f0000300000 prefer:0 file=/memfd:residency-unet\\040(deleted) dirty=256 N1=256 kernelpagesize_kB=4\n"
             "7f0000400000 default stack=3 anon=3 dirty=3 N1=3 kernelpagesize_kB=4\n"
             "7f0040000000 prefer:1 file=/memfd:residency-vae\\040(deleted) huge dirty=8 N1=8 kernelpagesize_kB=2048\n"
             "7f0080000000 default\n");
  const std::vector<std::span<const std::byte>> unet = {At(0x7f0000000000, 4 * kMiB)};
  CHECK(BytesByNode(unet, host.root()) == std::map<int, uint64_t>{{0, 2 * kMiB}, {1, 2 * kMiB}});
  const std::vector<std::span<const std::byte>> both = {At(0x7f0000000000, 4 * kMiB), At(0x7f0040000000, 16 * kMiB)};
  CHECK(BytesByNode(both, host.root()) == std::map<int, uint64_t>{{0, 2 * kMiB}, {1, 18 * kMiB}});
  const TempDir empty;
  CHECK(BytesByNode(both, empty.Path("")) == std::nullopt);
}

// The kernel's word about a mirror of this process.
std::string PolicyOf(const Mirror& mirror) {
  std::ostringstream address;
  address << std::hex << reinterpret_cast<uint64_t>(mirror.data());
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string word; maps >> word;) {
    if (word == address.str() && maps >> word) return word;
  }
  return "";
}

Model Small(const TempDir& dir) { return MakeModel({WriteContent(dir.Path("a"), 0, 5 * kMiB)}, {{{0, 0, 5 * kMiB}}}); }

bool KernelHasNodes() { return std::filesystem::exists("/proc/self/numa_maps"); }

TEST_CASE("a mirror's memory is asked of the node that is named, and of none where none is") {
  const TempDir dir;
  const Model model = Small(dir);
  const auto anywhere = ReadOne(model, 0);
  REQUIRE(anywhere.ok());
  const auto placed = ReadMirrors(model.layout, model.manifest, {.node = 0});
  REQUIRE(placed.ok());
  CheckImage(placed->mirrors[0], model, 0, ExpectedImage({{0, 0, 5 * kMiB}}));
  CHECK(placed->placed.ok() == KernelHasNodes());
  if (!KernelHasNodes()) return;
  CHECK(PolicyOf(*anywhere) == "default");
  CHECK(PolicyOf(placed->mirrors[0]) == "prefer:0");
  const std::vector<std::span<const std::byte>> images = {{placed->mirrors[0].data(), placed->mirrors[0].bytes()}};
  const auto bytes = BytesByNode(images);
  REQUIRE(bytes.has_value());
  // All of it is on node 0, or has spilled from there.
  uint64_t sum = 0;
  for (const auto& [node, part] : *bytes) sum += part;
  CHECK(sum == 6 * kMiB);
  if (MemoryNodes() == std::vector<int>{0}) CHECK(*bytes == std::map<int, uint64_t>{{0, 6 * kMiB}});
}

// Has the kernel refuse mbind to the calling thread, as containers do.
void ForbidMbind() {
  const std::array<sock_filter, 4> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mbind, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program = {filter.size(), const_cast<sock_filter*>(filter.data())};
  ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

TEST_CASE("a system that does not let us place memory has it where it likes, and is quoted") {
  const TempDir dir;
  const Model model = Small(dir);
  std::optional<absl::StatusOr<MirrorSet>> set;
  std::thread([&] {
    ForbidMbind();
    set = ReadMirrors(model.layout, model.manifest, {.node = 0});
  }).join();
  REQUIRE(set->ok());
  CHECK(absl::IsPermissionDenied((*set)->placed));
  CHECK(std::string((*set)->placed.message()).find("mbind of 6291456 bytes to node 0") == 0);
  CheckImage((*set)->mirrors[0], model, 0, ExpectedImage({{0, 0, 5 * kMiB}}));
  // The same of a node that is none of this machine's.
  const auto nowhere = ReadMirrors(model.layout, model.manifest, {.node = 1000});
  REQUIRE(nowhere.ok());
  CHECK_FALSE(nowhere->placed.ok());
  CheckImage(nowhere->mirrors[0], model, 0, ExpectedImage({{0, 0, 5 * kMiB}}));
}

}  // namespace
}  // namespace residency
