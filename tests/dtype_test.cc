// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/dtype.h"

#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <vector>

namespace residency {
namespace {

// From the safetensors format, version 0.8.
const struct {
  const char* name;
  uint32_t bits;
} kFormat[] = {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
               {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
               {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
               {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};

using Shape = std::vector<uint64_t>;

TEST_CASE("Every type of the format is known by its name and width") {
  std::set<DType> seen;
  for (const auto& type : kFormat) {
    INFO(type.name);
    const std::optional<DType> dtype = ParseDType(type.name);
    REQUIRE(dtype.has_value());
    CHECK(DTypeName(*dtype) == type.name);
    CHECK(DTypeBits(*dtype) == type.bits);
    seen.insert(*dtype);
  }
  CHECK(seen.size() == kDTypeCount);
}

TEST_CASE("Names are exact: no other case, no space, no other library's word") {
  for (const char* name : {"", "f32", "F32 ", " F32", "float32", "BF", "F8", "bfloat16", "F8_E4M3FN"}) {
    INFO(name);
    CHECK_FALSE(ParseDType(name).has_value());
  }
  CHECK_FALSE(ParseDType(std::string_view("F32\0", 4)).has_value());
}

TEST_CASE("Bytes of a tensor are elements times width") {
  CHECK(TensorBytes(DType::kF32, Shape{2, 3}) == 24);
  CHECK(TensorBytes(DType::kBF16, Shape{5, 2}) == 20);
  CHECK(TensorBytes(DType::kC64, Shape{3}) == 24);
  CHECK(TensorBytes(DType::kF4, Shape{3, 2}) == 3);
  CHECK(TensorBytes(DType::kF6E2M3, Shape{4}) == 3);
}

TEST_CASE("The empty shape is one element and a zero dimension is none") {
  CHECK(TensorBytes(DType::kF32, Shape{}) == 4);
  CHECK(TensorBytes(DType::kF64, Shape{0}) == 0);
  CHECK(TensorBytes(DType::kF64, Shape{3, 0, 5}) == 0);
}

TEST_CASE("A tensor that ends inside a byte has no size") {
  CHECK_FALSE(TensorBytes(DType::kF4, Shape{}).has_value());
  CHECK_FALSE(TensorBytes(DType::kF4, Shape{3}).has_value());
  CHECK_FALSE(TensorBytes(DType::kF6E3M2, Shape{2}).has_value());
}

TEST_CASE("A product that passes 64 bits is no size, also where it would wrap to a plausible one") {
  const uint64_t two_to_32 = uint64_t{1} << 32;
  CHECK_FALSE(TensorBytes(DType::kU8, Shape{two_to_32, two_to_32}).has_value());
  CHECK_FALSE(TensorBytes(DType::kF64, Shape{uint64_t{1} << 61}).has_value());
  CHECK_FALSE(TensorBytes(DType::kU8, Shape{two_to_32, two_to_32, 0}).has_value());
  CHECK_FALSE(TensorBytes(DType::kU8, Shape{~uint64_t{0}}).has_value());
  // The largest that fits: 2^64 - 8 bits.
  CHECK(TensorBytes(DType::kU8, Shape{(uint64_t{1} << 61) - 1}) == (uint64_t{1} << 61) - 1);
  CHECK(TensorBytes(DType::kU8, Shape{0, two_to_32, two_to_32}) == 0);
}

}  // namespace
}  // namespace residency
