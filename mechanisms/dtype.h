// SPDX-License-Identifier: Apache-2.0
//
// The element types of the safetensors format, by width in bits. The broker moves bytes and converts
// nothing, so a width and a name are all it knows of a type. Pure; any thread.
//
// Source of the names and widths: the safetensors format, version 0.8 (22 types).
#ifndef RESIDENCY_MECHANISMS_DTYPE_H_
#define RESIDENCY_MECHANISMS_DTYPE_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace residency {

enum class DType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
inline constexpr int kDTypeCount = 22;

// The format's own spelling ("BF16", "F8_E4M3"); exact case.
std::string_view DTypeName(DType dtype);
std::optional<DType> ParseDType(std::string_view name);

// Width of one element, 4 to 64 bits.
uint32_t DTypeBits(DType dtype);

// Bytes of a tensor of this shape: product(shape) * bits / 8, the empty shape being one element.
// Nothing where the product passes 64 bits (in bits) or does not end on a whole byte. The product is
// taken from the left and may not pass 64 bits on the way, even where a later dimension is 0, as in the
// format's reference reader.
std::optional<uint64_t> TensorBytes(DType dtype, std::span<const uint64_t> shape);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DTYPE_H_
