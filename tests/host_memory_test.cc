// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/host_memory.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/source_files.h"

namespace residency {
namespace {

// A directory that looks like a system's root to the reader.
class FakeRoot {
 public:
  FakeRoot() { Write("proc/meminfo", "MemTotal:       32768000 kB\nMemAvailable:    8388608 kB\nCached: 5 kB\n"); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = dir_.Path(path);
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  // This process's cgroup and where the file systems are mounted, as version 2 shows them.
  void UseVersion2(const std::string& cgroup) {
    Write("proc/self/cgroup", "0::" + cgroup + "\n");
    Write("proc/self/mountinfo",
          "24 1 0:22 / /proc rw - proc proc rw\n"
          "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void UseVersion1(const std::string& cgroup, const std::string& mounted = "/") {
    Write("proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:" + cgroup + "\n0::/\n");
    Write("proc/self/mountinfo",
          "30 24 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
          "31 24 0:27 " +
              mounted + " /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n");
  }
  HostMemory Read() const { return ReadHostMemory(dir_.Path("")); }
  HostMemoryReader Reader() const { return HostMemoryReader(dir_.Path("")); }

 private:
  TempDir dir_;
};

const std::string kV2 = "sys/fs/cgroup/";
const std::string kV1 = "sys/fs/cgroup/memory/";

TEST_CASE("without a cgroup's limit the room is MemAvailable less the reserve") {
  const FakeRoot root;
  const HostMemory memory = root.Read();
  CHECK(memory.available_bytes == 8 * kGiB);
  CHECK(memory.cgroup_limit_bytes == std::nullopt);
  CHECK(memory.mirror_limit_bytes() == std::nullopt);
  CHECK(memory.room_bytes() == 7 * kGiB);
}

TEST_CASE("memory.max of version 2 is read, and the cache of files counts as free but shared memory does not") {
  FakeRoot root;
  root.UseVersion2("/system.slice/residencyd.service");
  const std::string unit = kV2 + "system.slice/residencyd.service/";
  root.Write(unit + "memory.max", "4294967296\n");
  root.Write(unit + "memory.current", "2147483648\n");
  root.Write(unit + "memory.stat", "anon 1073741824\nfile 1073741824\nfile_mapped 7\nshmem 536870912\n");
  const HostMemory memory = root.Read();
  CHECK(memory.cgroup_limit_bytes == 4 * kGiB);
  CHECK(memory.mirror_limit_bytes() == 3 * kGiB);
  CHECK(memory.cgroup_available_bytes == 2 * kGiB + 512 * kMiB);
  CHECK(memory.room_bytes() == kGiB + 512 * kMiB);
}

TEST_CASE("whoever reads again looks for the mounts no more, and sees everything else as it is by then") {
  for (const bool version2 : {true, false}) {
    INFO("version " << (version2 ? 2 : 1));
    FakeRoot root;
    const auto use = [&](const std::string& cgroup) { version2 ? root.UseVersion2(cgroup) : root.UseVersion1(cgroup); };
    const std::string limit = version2 ? "memory.max" : "memory.limit_in_bytes";
    const std::string top = version2 ? kV2 : kV1;
    use("/a");
    root.Write(top + "a/" + limit, "2147483648\n");
    root.Write(top + "b/" + limit, "4294967296\n");
    const HostMemoryReader reader = root.Reader();
    CHECK(reader.Read().cgroup_limit_bytes == 2 * kGiB);
    root.Write(top + "a/" + limit, "3221225472\n");
    root.Write("proc/meminfo", "MemAvailable:    4194304 kB\n");
    root.Write("proc/self/mountinfo", "24 1 0:22 / /proc rw - proc proc rw\n");
    CHECK(reader.Read().cgroup_limit_bytes == 3 * kGiB);
    CHECK(reader.Read().available_bytes == 4 * kGiB);
    // Moved into another cgroup.
    use("/b");
    root.Write("proc/self/mountinfo", "");
    CHECK(reader.Read().cgroup_limit_bytes == 4 * kGiB);
    CHECK(root.Read().cgroup_limit_bytes == std::nullopt);
  }
}

TEST_CASE("the least of a cgroup and its ancestors counts, whichever it is") {
  FakeRoot root;
  root.UseVersion2("/a/b/c");
  root.Write(kV2 + "a/b/c/memory.max", "max\n");
  root.Write(kV2 + "a/b/memory.max", "6442450944\n");
  root.Write(kV2 + "a/memory.max", "8589934592\n");
  CHECK(root.Read().cgroup_limit_bytes == 6 * kGiB);
  root.Write(kV2 + "a/memory.max", "3221225472\n");
  CHECK(root.Read().cgroup_limit_bytes == 3 * kGiB);
  root.Write(kV2 + "a/b/c/memory.max", "2147483648\n");
  CHECK(root.Read().cgroup_limit_bytes == 2 * kGiB);
  // The one with the least limit need not be the one that leaves least.
  root.Write(kV2 + "a/b/c/memory.current", "4096\n");
  root.Write(kV2 + "a/memory.current", "2147483648\n");
  CHECK(root.Read().cgroup_available_bytes == kGiB);
}

TEST_CASE("\"max\" at every level is no limit") {
  FakeRoot root;
  root.UseVersion2("/a");
  root.Write(kV2 + "a/memory.max", "max\n");
  root.Write(kV2 + "a/memory.current", "4096\n");
  CHECK(root.Read().cgroup_limit_bytes == std::nullopt);
  CHECK(root.Read().cgroup_available_bytes == std::nullopt);
  CHECK(root.Read().room_bytes() == 7 * kGiB);
}

TEST_CASE("memory.limit_in_bytes of version 1 is read, and its huge value is no limit") {
  FakeRoot root;
  root.UseVersion1("/jobs/one");
  root.Write(kV1 + "memory.limit_in_bytes", "9223372036854771712\n");
  root.Write(kV1 + "jobs/memory.limit_in_bytes", "9223372036854771712\n");
  root.Write(kV1 + "jobs/one/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(root.Read().cgroup_limit_bytes == std::nullopt);
  root.Write(kV1 + "jobs/memory.limit_in_bytes", "2147483648\n");
  root.Write(kV1 + "jobs/memory.usage_in_bytes", "1073741824\n");
  root.Write(kV1 + "jobs/memory.stat", "cache 1\nshmem 1\ntotal_cache 805306368\ntotal_shmem 268435456\n");
  const HostMemory memory = root.Read();
  CHECK(memory.cgroup_limit_bytes == 2 * kGiB);
  CHECK(memory.mirror_limit_bytes() == kGiB);
  CHECK(memory.cgroup_available_bytes == kGiB + 512 * kMiB);
  CHECK(memory.room_bytes() == 512 * kMiB);
}

TEST_CASE("a container sees its own part of the hierarchy, and that is read") {
  FakeRoot root;
  // The mount shows /docker/id as its root, while the process is told its whole path.
  root.UseVersion1("/docker/id/inner", "/docker/id");
  root.Write(kV1 + "memory.limit_in_bytes", "4294967296\n");
  root.Write(kV1 + "inner/memory.limit_in_bytes", "3221225472\n");
  CHECK(root.Read().cgroup_limit_bytes == 3 * kGiB);
  // A path that is not below what is mounted: the mount's own directory is all there is to read.
  root.UseVersion1("/docker/id2", "/docker/id");
  CHECK(root.Read().cgroup_limit_bytes == 4 * kGiB);
  root.UseVersion1("/../../host", "/");
  CHECK(root.Read().cgroup_limit_bytes == 4 * kGiB);
}

TEST_CASE("a limit below the reserve leaves nothing, not everything") {
  FakeRoot root;
  root.UseVersion2("/");
  root.Write(kV2 + "memory.max", "536870912\n");
  root.Write(kV2 + "memory.current", "1073741824\n");
  root.Write("proc/meminfo", "MemAvailable: 1024 kB\n");
  const HostMemory memory = root.Read();
  CHECK(memory.mirror_limit_bytes() == 0);
  CHECK(memory.cgroup_available_bytes == 0);
  CHECK(memory.room_bytes() == 0);
}

TEST_CASE("what cannot be understood is absent and hides nothing else") {
  FakeRoot root;
  root.Write("proc/meminfo", "MemAvailable: lots kB\nMemAvailable\n:\n\n");
  root.UseVersion2("/a");
  root.Write(kV2 + "a/memory.max", "-1\n");
  HostMemory memory = root.Read();
  CHECK(memory.available_bytes == std::nullopt);
  CHECK(memory.cgroup_limit_bytes == std::nullopt);
  CHECK(memory.room_bytes() == std::nullopt);
  for (const char* garbage : {"", "\n", "max 5\n", "0x1000\n", "99999999999999999999999\n"}) {
    root.Write(kV2 + "a/memory.max", garbage);
    root.Write(kV2 + "memory.max", "2147483648\n");
    INFO(garbage);
    CHECK(root.Read().cgroup_limit_bytes == 2 * kGiB);
  }
  root.Write("proc/self/cgroup", "::\n7\n\n0:\nx:memory\n");
  root.Write("proc/self/mountinfo", "- cgroup2\n1 2 3 - cgroup2 a b\n\n - \n");
  memory = root.Read();
  CHECK(memory.cgroup_limit_bytes == std::nullopt);
}

TEST_CASE("this machine's own figures are sane") {
  const HostMemory memory = ReadHostMemory();
  REQUIRE(memory.available_bytes.has_value());
  CHECK(*memory.available_bytes > 64 * kMiB);
  CHECK(*memory.available_bytes < 1024 * kGiB * 1024);
}

}  // namespace
}  // namespace residency
