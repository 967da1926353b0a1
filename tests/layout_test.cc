// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/layout.h"

#include <catch2/catch.hpp>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "mechanisms/refusal.h"

namespace residency {
namespace {

LayoutTensor Tensor(const std::string& name, uint64_t bytes) {
  LayoutTensor tensor;
  tensor.name = name;
  tensor.dtype = DType::kU8;
  tensor.shape = {bytes};
  tensor.bytes = bytes;
  return tensor;
}

LayoutComponent Component(const std::string& name, const std::vector<uint64_t>& tensor_bytes) {
  LayoutComponent component;
  component.name = name;
  for (size_t i = 0; i < tensor_bytes.size(); ++i) {
    component.tensors.push_back(Tensor(name + "." + std::to_string(i), tensor_bytes[i]));
  }
  return component;
}

Layout Made(const std::vector<LayoutComponent>& components, uint64_t cell_bytes = kDefaultCellBytes,
            uint64_t granule_bytes = kDefaultGranuleBytes) {
  absl::StatusOr<Layout> layout = MakeLayout(components, cell_bytes, granule_bytes);
  REQUIRE(layout.ok());
  return *layout;
}

// Invariant 1, and that nothing else of the tensors was touched.
void CheckTensors(const Layout& layout, const std::vector<LayoutComponent>& given) {
  for (size_t c = 0; c < given.size(); ++c) {
    const LayoutComponent& component = layout.components[c];
    REQUIRE(component.tensors.size() == given[c].tensors.size());
    uint64_t end = component.device_offset;
    for (size_t t = 0; t < component.tensors.size(); ++t) {
      const LayoutTensor& tensor = component.tensors[t];
      REQUIRE(tensor.name == given[c].tensors[t].name);
      REQUIRE(tensor.bytes == given[c].tensors[t].bytes);
      REQUIRE(tensor.shape == given[c].tensors[t].shape);
      REQUIRE(tensor.device_offset % 256 == 0);
      REQUIRE(tensor.device_offset >= end);
      // No more room is left than alignment asks for.
      REQUIRE(tensor.device_offset - end < 256);
      end = tensor.device_offset + tensor.bytes;
    }
    REQUIRE(end <= component.device_offset + component.span_bytes);
    REQUIRE(component.device_offset + component.span_bytes - end < layout.granule_bytes);
  }
}

// Invariants 2, 3 and 4.
void CheckCells(const Layout& layout) {
  uint64_t offset = 0;
  uint64_t payload_bytes = 0;
  size_t cell = 0;
  for (size_t c = 0; c < layout.components.size(); ++c) {
    const LayoutComponent& component = layout.components[c];
    REQUIRE(component.device_offset == offset);
    REQUIRE(component.device_offset % layout.granule_bytes == 0);
    REQUIRE(component.first_cell == cell);
    uint64_t left_bytes = component.span_bytes;
    for (uint32_t i = 0; i < component.cell_count; ++i, ++cell) {
      REQUIRE(cell < layout.cells.size());
      REQUIRE(layout.cells[cell].component == c);
      REQUIRE(layout.cells[cell].device_offset == offset);
      const bool is_last = i + 1 == component.cell_count;
      REQUIRE(layout.cells[cell].bytes == (is_last ? left_bytes : layout.cell_bytes));
      REQUIRE(layout.cells[cell].bytes > 0);
      REQUIRE(layout.cells[cell].bytes <= layout.cell_bytes);
      REQUIRE(layout.cells[cell].bytes % layout.granule_bytes == 0);
      offset += layout.cells[cell].bytes;
      left_bytes -= layout.cells[cell].bytes;
    }
    REQUIRE(left_bytes == 0);
    uint64_t component_payload_bytes = 0;
    for (const LayoutTensor& tensor : component.tensors) component_payload_bytes += tensor.bytes;
    REQUIRE(component.payload_bytes == component_payload_bytes);
    payload_bytes += component_payload_bytes;
  }
  REQUIRE(cell == layout.cells.size());
  REQUIRE(layout.span_bytes == offset);
  REQUIRE(layout.payload_bytes == payload_bytes);
  REQUIRE(layout.tax_bytes() == offset - payload_bytes);
}

uint64_t RandomBytes(std::mt19937_64* random, uint64_t cell_bytes) {
  switch ((*random)() % 6) {
    case 0:
      return 0;
    case 1:
      return (*random)() % 16;
    case 2:
      return (*random)() % (64 * kKiB);
    case 3:
      return cell_bytes - 300 + (*random)() % 600;
    case 4:
      return 2 * kMiB * ((*random)() % 4);
    default:
      return (*random)() % (3 * cell_bytes);
  }
}

TEST_CASE("The four invariants hold for any model") {
  const uint64_t seed = 20240607;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 500; ++round) {
    INFO("seed " << seed << ", round " << round);
    const uint64_t granule_bytes = uint64_t{64 * kKiB} << (random() % 6);
    const uint64_t cell_bytes = kMinCellBytes << (random() % 8);
    std::vector<LayoutComponent> given;
    const size_t component_count = random() % 6;
    for (size_t c = 0; c < component_count; ++c) {
      std::vector<uint64_t> tensor_bytes(random() % 40);
      for (uint64_t& bytes : tensor_bytes) bytes = RandomBytes(&random, cell_bytes);
      given.push_back(Component("c" + std::to_string(c), tensor_bytes));
      // What MakeLayout is to ignore.
      given.back().device_offset = random();
      for (LayoutTensor& tensor : given.back().tensors) tensor.device_offset = random();
    }
    const Layout layout = Made(given, cell_bytes, granule_bytes);
    REQUIRE(layout.cell_bytes == cell_bytes);
    REQUIRE(layout.granule_bytes == granule_bytes);
    REQUIRE(layout.components.size() == given.size());
    CheckTensors(layout, given);
    CheckCells(layout);
    REQUIRE(Made(given, cell_bytes, granule_bytes).digest == layout.digest);
  }
}

TEST_CASE("Twenty thousand tensors of four bytes cost three granules") {
  // 20,000 * 256 = 5,120,000 bytes, and 2 granules are 4,194,304.
  const Layout layout = Made({Component("model", std::vector<uint64_t>(20'000, 4))});
  CHECK(layout.payload_bytes == 80'000);
  CHECK(layout.span_bytes == 6 * kMiB);
  REQUIRE(layout.cells.size() == 1);
  CHECK(layout.cells[0].bytes == 6 * kMiB);
  CHECK(layout.components[0].tensors[19'999].device_offset == 19'999 * 256);
}

TEST_CASE("Tensors lie across cells and the last cell is cut") {
  // 100 MiB, then 30 MiB + 1: 64 + 64 + 4 MiB, the last being 2 MiB + 1 rounded up.
  const Layout layout = Made({Component("a", {100 * kMiB, 30 * kMiB + 1}), Component("b", {1})});
  REQUIRE(layout.cells.size() == 4);
  CHECK(layout.cells[0].bytes == 64 * kMiB);
  CHECK(layout.cells[1].bytes == 64 * kMiB);
  CHECK(layout.cells[2].bytes == 4 * kMiB);
  CHECK(layout.cells[3].bytes == 2 * kMiB);
  CHECK(layout.cells[3].device_offset == 132 * kMiB);
  CHECK(layout.components[0].tensors[1].device_offset == 100 * kMiB);
  CHECK(layout.components[1].device_offset == 132 * kMiB);
  CHECK(layout.components[1].tensors[0].device_offset == 132 * kMiB);
  CHECK(layout.span_bytes == 134 * kMiB);
  CHECK(layout.tax_bytes() == 4 * kMiB - 2);
}

TEST_CASE("A span that ends on a cell has no further cell") {
  const Layout layout = Made({Component("a", {128 * kMiB})});
  CHECK(layout.cells.size() == 2);
  CHECK(layout.tax_bytes() == 0);
}

TEST_CASE("A component without bytes has no cells and takes no room") {
  const Layout layout = Made({Component("none", {}), Component("zero", {0, 0}), Component("one", {1})});
  CHECK(layout.components[0].cell_count == 0);
  CHECK(layout.components[1].cell_count == 0);
  CHECK(layout.components[1].span_bytes == 0);
  REQUIRE(layout.cells.size() == 1);
  CHECK(layout.cells[0].component == 2);
  CHECK(layout.span_bytes == 2 * kMiB);
}

TEST_CASE("Cells of a wrong size are refused") {
  const struct {
    uint64_t cell_bytes;
    uint64_t granule_bytes;
  } kBad[] = {{0, 2 * kMiB},          {kMiB, kMiB},      {3 * kMiB, kMiB}, {512 * kMiB, 2 * kMiB},
              {2 * kMiB, 4 * kMiB},   {64 * kMiB, 0},    {64 * kMiB, 128}, {64 * kMiB, 3 * kMiB},
              {64 * kMiB + 1, 65536}, {~uint64_t{0}, 1}, {2 * kMiB, 1}};
  for (const auto& bad : kBad) {
    INFO(bad.cell_bytes << " " << bad.granule_bytes);
    const absl::StatusOr<Layout> layout = MakeLayout({Component("a", {1})}, bad.cell_bytes, bad.granule_bytes);
    CHECK(layout.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(ReasonOf(layout.status()) == "BAD_CELL_BYTES");
  }
  CHECK(MakeLayout({Component("a", {1})}, kMinCellBytes, kMinCellBytes).ok());
  CHECK(MakeLayout({Component("a", {1})}, kMaxCellBytes, kTensorAlignment).ok());
}

TEST_CASE("A model that no address space holds is refused, whatever its sizes add up to in 64 bits") {
  const uint64_t huge = uint64_t{1} << 62;
  for (const std::vector<uint64_t>& tensor_bytes : {std::vector<uint64_t>{~uint64_t{0}},
                                                    {huge + 1},
                                                    {1, ~uint64_t{0}},
                                                    {huge, huge, huge, huge, 4},
                                                    {huge, 1},
                                                    {huge}}) {
    const absl::StatusOr<Layout> layout = MakeLayout({Component("a", tensor_bytes)}, kMaxCellBytes, 2 * kMiB);
    CHECK(layout.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(ReasonOf(layout.status()) == "TOO_LARGE");
  }
}

TEST_CASE("The number of cells is bounded over all components together") {
  const uint64_t most_bytes = uint64_t{kMaxCells} * kMinCellBytes;
  CHECK(Made({Component("a", {most_bytes})}, kMinCellBytes).cells.size() == kMaxCells);
  CHECK(ReasonOf(MakeLayout({Component("a", {most_bytes + 1})}, kMinCellBytes, 2 * kMiB).status()) == "TOO_LARGE");
  CHECK(ReasonOf(MakeLayout({Component("a", {most_bytes}), Component("b", {1})}, kMinCellBytes, 2 * kMiB).status()) ==
        "TOO_LARGE");
}

TEST_CASE("The digest changes with everything that a client relies on") {
  const std::vector<LayoutComponent> given = {Component("a", {256, 512}), Component("b", {16})};
  const uint64_t digest = Made(given).digest;
  const std::vector<std::function<void(std::vector<LayoutComponent>&)>> kChanges = {
      [](auto& m) { m[0].name = "x"; },
      [](auto& m) { m[0].tensors[0].name = "x"; },
      [](auto& m) { m[0].tensors[0].dtype = DType::kI8; },
      [](auto& m) {
        m[0].tensors[0].shape = {16, 16};
      },
      [](auto& m) {
        m[0].tensors[0].shape = {1, 256};
      },
      [](auto& m) { m[0].tensors[0].bytes = 255; },
      [](auto& m) { std::swap(m[0].tensors[0], m[0].tensors[1]); },
      [](auto& m) { std::swap(m[0], m[1]); },
      [](auto& m) { m[0].tensors.pop_back(); },
      [](auto& m) { m.pop_back(); },
      [](auto& m) { m.push_back(Component("c", {})); },
      // The same names in the same order, but the second tensor is in another component.
      [](auto& m) {
        m[1].tensors.insert(m[1].tensors.begin(), m[0].tensors[1]);
        m[0].tensors.pop_back();
      },
  };
  for (size_t i = 0; i < kChanges.size(); ++i) {
    INFO("change " << i);
    std::vector<LayoutComponent> changed = given;
    kChanges[i](changed);
    CHECK(Made(changed).digest != digest);
  }
  CHECK(Made(given, 32 * kMiB).digest != digest);
  CHECK(Made(given, kDefaultCellBytes, 64 * kKiB).digest != digest);
  CHECK(Made(given).digest == digest);
}

TEST_CASE("The digest is the same in every process and build") {
  // FNV-1a over the layout's fields, computed with another program.
  LayoutTensor tensor = Tensor("w", 24);
  tensor.dtype = DType::kF32;
  tensor.shape = {2, 3};
  LayoutComponent component;
  component.name = "model";
  component.tensors = {tensor};
  CHECK(Made({component}).digest == 2878218730750461796u);
}

}  // namespace
}  // namespace residency
