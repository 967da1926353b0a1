// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/digest.h"

namespace residency {
namespace {

// The bytes of digest.cu as nvcc compiled it, separated by commas; the build writes the file. A lone zero is what it
// writes where there is no nvcc. The loader reads the image in words of eight bytes.
alignas(8) constexpr unsigned char kImage[] = {
#include "mechanisms/digest_fatbin.inc"
};

}  // namespace

std::span<const unsigned char> DigestFatbin() {
  if constexpr (sizeof(kImage) == 1) return {};
  return kImage;
}

}  // namespace residency
