// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/dtype.h"

#include <array>
#include <cstddef>

namespace residency {
namespace {

struct Type {
  std::string_view name;
  uint32_t bits;
};

// In the order of DType.
constexpr std::array<Type, kDTypeCount> kTypes = {{
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
}};
static_assert(static_cast<int>(DType::kU64) + 1 == kDTypeCount);

}  // namespace

std::string_view DTypeName(DType dtype) { return kTypes[static_cast<size_t>(dtype)].name; }

std::optional<DType> ParseDType(std::string_view name) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

uint32_t DTypeBits(DType dtype) { return kTypes[static_cast<size_t>(dtype)].bits; }

std::optional<uint64_t> TensorBytes(DType dtype, std::span<const uint64_t> shape) {
  uint64_t bits = 1;
  for (const uint64_t dimension : shape) {
    if (__builtin_mul_overflow(bits, dimension, &bits)) return std::nullopt;
  }
  if (__builtin_mul_overflow(bits, uint64_t{DTypeBits(dtype)}, &bits)) return std::nullopt;
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

}  // namespace residency
