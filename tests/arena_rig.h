// SPDX-License-Identifier: Apache-2.0
//
// An arena of two components over random words, and what it needs, for the tests of arenas.
#ifndef RESIDENCY_TESTS_ARENA_RIG_H_
#define RESIDENCY_TESTS_ARENA_RIG_H_

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "mechanisms/arena.h"
#include "tests/test_driver.h"

namespace residency {

// Host memory that holds a component's bytes.
class TestSource final : public ImageSource {
 public:
  TestSource(const Layout& layout, uint32_t component, uint64_t seed)
      : first_offset_(layout.components[component].device_offset),
        layout_(layout),
        words_(RandomWords(layout.components[component].span_bytes / 8, seed)) {}
  const std::byte* CellData(uint32_t cell) const override {
    return reinterpret_cast<const std::byte*>(words_.data()) + layout_.cells[cell].device_offset - first_offset_;
  }
  uint64_t CellBytes(uint32_t cell) const override { return layout_.cells[cell].bytes; }
  uint64_t CellDigest(uint32_t cell) const override {
    return DigestWordsPortable(reinterpret_cast<const uint64_t*>(CellData(cell)), layout_.cells[cell].bytes / 8, 0) ^
           wrong;
  }
  uint64_t wrong = 0;  // not 0: the digest is another one

 private:
  const uint64_t first_offset_;
  const Layout& layout_;
  // Shared by all tests, since making them takes longer than most of these.
  static const std::vector<uint64_t>& RandomWords(uint64_t count, uint64_t seed) {
    static std::map<std::pair<uint64_t, uint64_t>, std::vector<uint64_t>> made;
    std::vector<uint64_t>& words = made[{count, seed}];
    if (!words.empty()) return words;
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i < count; ++i) words.push_back(random());
    return words;
  }

  const std::vector<uint64_t>& words_;
};

// In place of the report of a Verify that failed.
inline constexpr VerifyReport kNotVerified = {.refilled_cells = ~uint64_t{0}};

// One tensor of so many bytes.
inline LayoutComponent ComponentOf(const char* name, uint64_t bytes) {
  LayoutComponent made{.name = name};
  made.tensors = {{.name = "w", .dtype = DType::kU8, .shape = {bytes}, .bytes = bytes}};
  return made;
}

inline Layout TwoComponents() {
  // 3 cells of 4 MiB, one of 2 MiB; 1 cell of 2 MiB.
  return *MakeLayout({ComponentOf("big", 13 * kMiB + 5), ComponentOf("small", 100)}, 4 * kMiB, 2 * kMiB);
}

inline Plan FirstResident(const Layout& layout) {
  Plan plan = NoneResident(layout);
  plan.cells[0] = CellResidency::kResident;
  return plan;
}

// An arena over `driver` and all it needs.
struct ArenaRig {
  explicit ArenaRig(const Driver& driver = TestDriver(), const ArenaOptions& options = {})
      : layout(TwoComponents()),
        big(layout, 0, 1),
        small(layout, 1, 2),
        device(OpenTestDevice(driver)),
        pool(*device),
        digester(*Digester::Create(*device)),
        arena(*Arena::Create(*device, pool, *digester, layout, options)) {}

  std::vector<const Source*> sources() const { return {&big, &small}; }
  absl::StatusOr<RealizeReport> Realize(const Plan& plan) { return arena->Realize(plan, sources()); }

  // The bytes that lie at the arena's addresses, cell by cell, are those of the sources.
  bool HoldsItsSources(const Plan& plan) {
    auto stream = *device->CreateStream();
    for (uint32_t cell = 0; cell < layout.cells.size(); ++cell) {
      if (plan.cells[cell] != CellResidency::kResident) continue;
      const LayoutCell& place = layout.cells[cell];
      std::vector<std::byte> read(place.bytes);
      if (!device->CopyToHost(read.data(), arena->address() + place.device_offset, place.bytes, stream).ok())
        return false;
      if (!device->Synchronize(stream).ok()) return false;
      const TestSource& source = place.component == 0 ? big : small;
      if (std::memcmp(read.data(), source.CellData(cell), place.bytes) != 0) return false;
    }
    return true;
  }

  const Layout layout;
  TestSource big;
  TestSource small;
  std::unique_ptr<Device> device;
  CellPool pool;
  std::unique_ptr<Digester> digester;
  std::unique_ptr<Arena> arena;
};

}  // namespace residency

#endif  // RESIDENCY_TESTS_ARENA_RIG_H_
