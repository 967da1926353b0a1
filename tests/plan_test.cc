// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/plan.h"

#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>

namespace residency {
namespace {

// Cells of 4 MiB: three of one component, the last cut to 2 MiB, and one of 2 MiB of another.
Layout FourCells() {
  LayoutTensor large;
  large.name = "large";
  large.bytes = 9 * kMiB;
  LayoutTensor small;
  small.name = "small";
  small.bytes = 1;
  LayoutComponent first;
  first.name = "first";
  first.tensors = {large};
  LayoutComponent second;
  second.name = "second";
  second.tensors = {small};
  absl::StatusOr<Layout> layout = MakeLayout({first, second}, 4 * kMiB, 2 * kMiB);
  REQUIRE(layout.ok());
  REQUIRE(layout->cells.size() == 4);
  return *layout;
}

TEST_CASE("A fully resident model costs its span to the byte") {
  const Layout layout = FourCells();
  CHECK(Price(layout, AllResident(layout)) == 12 * kMiB);
  CHECK(Price(layout, AllResident(layout)) == layout.span_bytes);
}

TEST_CASE("A model of which nothing is resident costs nothing") {
  const Layout layout = FourCells();
  const Plan plan = NoneResident(layout);
  CHECK(plan.cells == std::vector<CellResidency>(4, CellResidency::kAbsent));
  CHECK(Price(layout, plan) == 0);
}

TEST_CASE("A windowed cell costs nothing itself and a window slot costs a whole cell") {
  const Layout layout = FourCells();
  Plan plan;
  plan.cells = {CellResidency::kResident, CellResidency::kWindowed, CellResidency::kWindowed, CellResidency::kAbsent};
  plan.window_slots = 2;
  CHECK(Price(layout, plan) == 4 * kMiB + 2 * 4 * kMiB);
}

TEST_CASE("A component's plan has its own cells and no other") {
  const Layout layout = FourCells();
  CHECK(Price(layout, ComponentResident(layout, 0)) == 10 * kMiB);
  CHECK(Price(layout, ComponentResident(layout, 1)) == 2 * kMiB);
  CHECK(ComponentResident(layout, 1).cells[3] == CellResidency::kResident);
}

TEST_CASE("A cut cell costs what it was cut to") {
  const Layout layout = FourCells();
  Plan plan = NoneResident(layout);
  plan.cells[2] = CellResidency::kResident;
  plan.cells[3] = CellResidency::kResident;
  CHECK(Price(layout, plan) == 4 * kMiB);
}

TEST_CASE("The price of many slots of large cells does not wrap at 32 bits") {
  const Layout layout = FourCells();
  Plan plan = NoneResident(layout);
  plan.window_slots = 1 << 20;
  CHECK(Price(layout, plan) == uint64_t{1} << 42);
}

TEST_CASE("An empty layout has empty plans without a price") {
  const Layout layout;
  CHECK(AllResident(layout).cells.empty());
  CHECK(Price(layout, AllResident(layout)) == 0);
}

TEST_CASE("A plan for another layout stops the process instead of giving a wrong price") {
  const Layout layout = FourCells();
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Catch2 would report the signal as a failure of this test.
    std::signal(SIGABRT, SIG_DFL);
    Price(layout, Plan{});
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
}

TEST_CASE("An unset budget is told from a budget of zero") {
  Budget unset;
  Budget zero;
  zero.device_bytes = 0;
  CHECK_FALSE(unset == zero);
  CHECK(unset == Budget{});
}

}  // namespace
}  // namespace residency
