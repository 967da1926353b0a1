// SPDX-License-Identifier: Apache-2.0
//
// One 64-bit digest per cell, the same value from the processor and from the GPU.
//
//   digest(cell) = sum over i of mix(word[i] + (i + 1) * kDigestWeyl)   mod 2^64
//
// over the cell's 8-byte little-endian words, padding included, where mix is the 64-bit finaliser of
// MurmurHash3 (a bijection: two shifts-and-xors, two multiplications, one more shift-and-xor).
// A bijection per word means that a change of one word always changes the digest; the position enters
// through the Weyl sequence, so swapped words and a cell of another place are seen; the sum does not
// depend on order, so blocks of a GPU and pieces of a file add up in any order. It finds mistakes, it is
// no defence against somebody who forges bytes.
//
// Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_DIGEST_H_
#define RESIDENCY_MECHANISMS_DIGEST_H_

#include <cstdint>
#include <span>

#include "mechanisms/digest_item.h"

namespace residency {

// The part of a cell's digest that `words` contributes, the first of them having `first_index` within
// the cell. The parts of a cell add up to its digest. Chooses AVX2 at run time where there is AVX2.
uint64_t DigestWords(const uint64_t* words, uint64_t word_count, uint64_t first_index);

// The same without AVX2; what the other two are held against.
uint64_t DigestWordsPortable(const uint64_t* words, uint64_t word_count, uint64_t first_index);

// The GPU image (a fat binary with PTX for the oldest supported architecture) that holds kDigestKernel,
// for cuModuleLoadData; empty where the project was built without nvcc.
std::span<const unsigned char> DigestFatbin();

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DIGEST_H_
