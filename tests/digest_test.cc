// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/digest.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace residency {
namespace {

// The expected figures come from this Python:
//
//   M = 2**64 - 1
//   def mix(k):
//       k ^= k >> 33; k = k * 0xff51afd7ed558ccd & M
//       k ^= k >> 33; k = k * 0xc4ceb9fe1a85ec53 & M
//       return k ^ k >> 33
//   def digest(words, first=0):
//       return sum(mix((w + (first + i + 1) * 0x9e3779b97f4a7c15) & M) for i, w in enumerate(words)) & M
//   print(*map(hex, [mix(1), digest([0]), digest(range(1000)), digest([0] * 262144),
//                    digest([i * i for i in range(77)], 2**40 + 1), digest([M] * 13, 2**64 - 5)]), sep='\n')
constexpr uint64_t kMixOfOne = 0xb456bcfc34c2cb2c;
constexpr uint64_t kZeroWord = 0x9ca066f1a4ab2eea;
constexpr uint64_t kCountTo1000 = 0x7840d185a9bdab92;
constexpr uint64_t kZeroGranule = 0x14afe6db2f1d0630;
constexpr uint64_t kSquaresFarIn = 0x3f085216458e3d71;
constexpr uint64_t kOnesAcrossTheWrap = 0xf8c07453c2f8c9a1;

using Words = std::vector<uint64_t>;

Words RandomWords(size_t count, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  Words words(count);
  for (uint64_t& word : words) word = random();
  return words;
}

uint64_t Digest(const Words& words, uint64_t first_index = 0) {
  return DigestWords(words.data(), words.size(), first_index);
}

void CheckBoth(const Words& words, uint64_t first_index, uint64_t expected) {
  CHECK(DigestWords(words.data(), words.size(), first_index) == expected);
  CHECK(DigestWordsPortable(words.data(), words.size(), first_index) == expected);
}

TEST_CASE("the digest is the one that an independent program computes") {
  CHECK(DigestMix(1) == kMixOfOne);
  CheckBoth({0}, 0, kZeroWord);
  Words count(1000);
  std::iota(count.begin(), count.end(), 0);
  CheckBoth(count, 0, kCountTo1000);
  CheckBoth(Words(262144, 0), 0, kZeroGranule);
  Words squares(77);
  for (size_t i = 0; i < squares.size(); ++i) squares[i] = i * i;
  CheckBoth(squares, (uint64_t{1} << 40) + 1, kSquaresFarIn);
  CheckBoth(Words(13, ~uint64_t{0}), ~uint64_t{0} - 4, kOnesAcrossTheWrap);
}

TEST_CASE("no words add nothing") {
  CHECK(DigestWords(nullptr, 0, 7) == 0);
  CHECK(DigestWordsPortable(nullptr, 0, 7) == 0);
}

TEST_CASE("the chosen code path equals the portable one at every length, index and alignment") {
  const Words words = RandomWords(304);
  for (uint64_t count = 0; count <= 300; ++count) {
    for (uint64_t offset = 0; offset < 4; ++offset) {
      for (uint64_t first_index : {uint64_t{0}, uint64_t{1}, uint64_t{4097}, ~uint64_t{0} - 3}) {
        INFO(count << " words from word " << offset << ", first index " << first_index);
        REQUIRE(DigestWords(words.data() + offset, count, first_index) ==
                DigestWordsPortable(words.data() + offset, count, first_index));
      }
    }
  }
}

TEST_CASE("every bit of a word counts") {
  Words words = RandomWords(33);
  const uint64_t right = Digest(words);
  for (size_t word : {size_t{0}, size_t{6}, size_t{31}, size_t{32}}) {
    for (int bit = 0; bit < 64; ++bit) {
      words[word] ^= uint64_t{1} << bit;
      INFO("word " << word << ", bit " << bit);
      CHECK(Digest(words) != right);
      words[word] ^= uint64_t{1} << bit;
    }
  }
  CHECK(Digest(words) == right);
}

TEST_CASE("every bit of a word of zeros counts") {
  Words words(16, 0);
  const uint64_t right = Digest(words);
  for (int bit = 0; bit < 64; ++bit) {
    words[5] = uint64_t{1} << bit;
    CHECK(Digest(words) != right);
  }
}

TEST_CASE("two words that changed places are seen") {
  Words words = RandomWords(64);
  const uint64_t right = Digest(words);
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    std::swap(words[i], words[i + 1]);
    CHECK(Digest(words) != right);
    std::swap(words[i], words[i + 1]);
  }
  std::swap(words[3], words[60]);
  CHECK(Digest(words) != right);
}

TEST_CASE("a cell shifted by a word or by a byte is seen") {
  const Words words = RandomWords(512);
  const uint64_t right = DigestWords(words.data(), 500, 0);
  CHECK(DigestWords(words.data() + 1, 500, 0) != right);
  Words shifted(500);
  std::memcpy(shifted.data(), reinterpret_cast<const char*>(words.data()) + 1, 500 * sizeof(uint64_t));
  CHECK(Digest(shifted) != right);
}

TEST_CASE("the same words at another place of the cell have another digest") {
  const Words words(100, 42);
  CHECK(Digest(words, 0) != Digest(words, 1));
  CHECK(Digest(words, 0) != Digest(words, 100));
}

TEST_CASE("a stale cell is told from a fresh one, and from an empty one") {
  const Words old_cell = RandomWords(4096, 1);
  const Words new_cell = RandomWords(4096, 2);
  const Words empty(4096, 0);
  CHECK(Digest(old_cell) != Digest(new_cell));
  CHECK(Digest(old_cell) != Digest(empty));
  Words partly = new_cell;
  std::copy(old_cell.begin() + 4000, old_cell.end(), partly.begin() + 4000);
  CHECK(Digest(partly) != Digest(new_cell));
}

TEST_CASE("the parts of a cell add up to its digest, wherever it is cut and in any order") {
  const Words words = RandomWords(301);
  const uint64_t whole = Digest(words);
  for (size_t cut = 0; cut <= words.size(); ++cut) {
    const uint64_t back = DigestWords(words.data() + cut, words.size() - cut, cut);
    CHECK(back + DigestWords(words.data(), cut, 0) == whole);
  }
}

TEST_CASE("random damage of any extent is seen") {
  std::mt19937_64 random(20240501);
  const Words words = RandomWords(1024, 3);
  const uint64_t right = Digest(words);
  for (int round = 0; round < 2000; ++round) {
    Words damaged = words;
    const size_t first = random() % words.size();
    const size_t count = 1 + random() % (words.size() - first);
    for (size_t i = first; i < first + count; ++i) damaged[i] = random();
    REQUIRE(damaged != words);
    REQUIRE(Digest(damaged) != right);
  }
}

TEST_CASE("the GPU image is a whole fat binary") {
  const std::span<const unsigned char> image = DigestFatbin();
  REQUIRE_FALSE(image.empty());
  // The magic number, then the version and the lengths of header and body, as nvcc of CUDA 11 to 13 writes them.
  struct {
    uint32_t magic;
    uint16_t version;
    uint16_t header_bytes;
    uint64_t body_bytes;
  } header;
  REQUIRE(image.size() > sizeof(header));
  std::memcpy(&header, image.data(), sizeof(header));
  CHECK(header.magic == 0xba55ed50);
  CHECK(header.header_bytes + header.body_bytes == image.size());
  CHECK(reinterpret_cast<uintptr_t>(image.data()) % 8 == 0);
}

}  // namespace
}  // namespace residency
