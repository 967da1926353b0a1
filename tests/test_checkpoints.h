// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints on disk, and what is truly in them: those of tests/data/real, which other libraries wrote and read
// back, and large ones of random bytes that are written here, whose hashes are OpenSSL's.
#ifndef RESIDENCY_TESTS_TEST_CHECKPOINTS_H_
#define RESIDENCY_TESTS_TEST_CHECKPOINTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace residency {

struct TrueTensor {
  std::string component;  // the folder, for a pipeline
  std::string name;
  std::string dtype;  // the safetensors format's spelling
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
  std::string sha256;
};

// By the name that residencyctl shows: the file's, or COMPONENT/NAME where several components have it.
using Hashes = std::map<std::string, std::string>;

// The folders of tests/data/real.
inline const std::vector<std::string> kRealCheckpoints = {"flux-like", "llama-sharded", "llama-lora", "whisper-fp16"};

std::string RealCheckpoint(const std::string& folder);
std::vector<TrueTensor> TrueTensors(const std::string& folder);
Hashes TrueHashes(const std::string& folder);

// Writes a safetensors file of U8 tensors with these names and sizes, in this order, and random bytes.
struct NamedBytes {
  std::string name;
  uint64_t bytes = 0;
};
Hashes WriteNamedCheckpoint(const std::string& path, const std::vector<NamedBytes>& tensors, uint64_t seed);
// The same of tensors t0, t1, ...
Hashes WriteCheckpoint(const std::string& path, const std::vector<uint64_t>& tensor_bytes, uint64_t seed);

// A safetensors file of U8 tensors of `tensor_bytes` each with holes but for one page of random bytes in every 2 MiB:
// large, and soon written. Bytes that are a hole on disk are bytes like any others once they are read.
void WriteSparseCheckpoint(const std::string& path, const std::vector<uint64_t>& tensor_bytes, uint64_t seed);

}  // namespace residency

#endif  // RESIDENCY_TESTS_TEST_CHECKPOINTS_H_
