// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints that are directories: one file, shards with an index, or a pipeline of such directories.
// Symbolic links are followed. Blocking file I/O, for workers.
#ifndef RESIDENCY_MECHANISMS_CHECKPOINT_DIR_H_
#define RESIDENCY_MECHANISMS_CHECKPOINT_DIR_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/file_table.h"
#include "mechanisms/manifest.h"

namespace residency {

// The tensors of a directory that is no pipeline. Which files are the weights:
//  - with *.safetensors.index.json: the files that it names, by name; all others are ignored;
//  - else the one *.safetensors file.
// Of several (indices, or files), STEM is taken where all others are variants of it, STEM.fp16 and the
// like, for STEM one of model, diffusion_pytorch_model, adapter_model; else NOT_A_CHECKPOINT names them.
absl::StatusOr<std::vector<ManifestTensor>> ReadCheckpointDir(const std::string& path, FileTable* files);

// Whether `path` is a pipeline: a directory with model_index.json.
bool IsPipeline(const std::string& path);

// The components of a pipeline, in the order of model_index.json, where a key with a pair
// [library, class] names a folder:
//  - [null, null] is skipped;
//  - a folder with safetensors is a component;
//  - a folder without weights is skipped; one with weights in another format is NOT_A_CHECKPOINT, for
//    leaving it out would be silent;
//  - a folder that is not there is FILE_MISSING, unless its class ends in Tokenizer, TokenizerFast,
//    Scheduler, Processor or FeatureExtractor, which have no weights.
absl::StatusOr<std::vector<ManifestComponent>> ReadPipeline(const std::string& path, FileTable* files);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_CHECKPOINT_DIR_H_
